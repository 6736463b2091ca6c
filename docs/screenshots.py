"""Takes the screenshots docs/images/page-*.png: the page with a real model, desktop and phone, light and dark.

    nanorun speedrun && nanorun train sft --mixture sample      # a model to chat with
    python docs/screenshots.py

Questions and answers are real (greedy sampling). Needs playwright and the system's Chromium. With Debian's
fonts-inter and fonts-jetbrains-mono the page looks as on most desktops.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
GREEDY = "localStorage['nanorun:settings'] = JSON.stringify({ temperature: 0 })"
EARLIER = ("How is turtle spelled?", "What colour is Waffle?", "Please work out 31 + 8.")
QUESTIONS = ("What work does Jasper do?", "What is 12 + 30?", "Count the letter e in kettle.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="sample-sft")
    model = parser.parse_args().model
    server = subprocess.Popen(
        [sys.executable, "-m", "nanorun", "serve", "--port", "0", "--model", model],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().removesuffix("/v1")
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for theme in ("light", "dark"):
                for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
                    page = browser.new_page(
                        color_scheme=theme, device_scale_factor=2, reduced_motion="reduce", **size
                    )
                    page.add_init_script(GREEDY)
                    page.goto(url)
                    if (theme, name) == ("dark", "phone"):
                        page.locator(".card").first.wait_for()
                    else:
                        chat(page)
                    save(page.screenshot(), ROOT / "docs" / "images" / f"page-{name}-{theme}.png")
                    page.close()
    finally:
        server.terminate()
        server.wait()


def chat(page: Page) -> None:
    expect(page.locator("#model")).to_have_attribute("data-state", "ready")
    for conversation in (*((question,) for question in EARLIER), QUESTIONS):
        page.keyboard.press("Control+k")
        for number, question in enumerate(conversation, 1):
            page.locator("#text").fill(question)
            page.keyboard.press("Enter")
            expect(page.locator("article.answer")).to_have_count(number)
            expect(page.locator("#send")).to_have_attribute("aria-label", "Send")
    print([re.sub(r"\s+", " ", said) for said in page.locator(".answer .body").all_inner_texts()])


def save(png: bytes, path: Path) -> None:
    """Quantizes to 256 colors: enough for these images, at a third of the size."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    image.save(path, optimize=True)
    print(path, f"{path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
