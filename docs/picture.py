"""Draws docs/images/speedrun.svg: the actual output of `nanorun speedrun` in an empty home.

python docs/picture.py
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]


def brief(lines: list[str]) -> list[str]:
    """The lines, with only the last progress line of each task."""
    tasks = [re.match(r"\w+ [\w-]+(?=: \S+ of \S+ (tok|step|question), )", line) for line in lines]
    last = {match[0]: i for i, match in enumerate(tasks) if match}
    return [
        line
        for i, (line, match) in enumerate(zip(lines, tasks, strict=True))
        if not match or last[match[0]] == i
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [Path(sys.executable).with_name("nanorun"), "speedrun"],  # as make starts it
            cwd=ROOT,
            env={**os.environ, "NANORUN_HOME": home},
            capture_output=True,
            text=True,
            check=True,
        )
        printed = (done.stderr + done.stdout).replace(home + "/", "").replace(home, "here")
    console = Console(record=True, width=104, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("$ make speedrun", style="bold green"))
    for line in brief(printed.splitlines()):
        if re.match(r"[A-Z]{2,}", line):
            console.print(Text(line, style="bold cyan"))
        elif re.match(r"\d/\d |> ", line):
            console.print(Text(line, style="bold"))
        elif line.count("│") == 1:
            prompt, reply = line.split("│")
            console.print(Text(prompt, style="bold green").append(reply, style="not bold white"))
        elif "│" in line:
            tokens = Text()
            for i, piece in enumerate(line.split("│")):
                tokens.append(
                    piece, style=("black on #a6e3a1", "black on #89b4fa", "black on #f9e2af")[i % 3]
                )
            console.print(tokens)
        else:
            console.print(Text(line))
    path = ROOT / "docs" / "images" / "speedrun.svg"
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="nanorun"), flags=re.DOTALL)
    path.write_text(
        svg, encoding="utf-8"
    )  # without rich's web fonts: the picture loads nothing from the network
    print(path)


if __name__ == "__main__":
    main()
