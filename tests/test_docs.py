"""What the tree says about itself is true: figures, links, quoted code, kept results, pinned versions."""

import json
import pkgutil
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_tables_say_what_their_measurements_say():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr + "\nrun: python benchmarks/tables.py"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_kept_result_says_when_where_and_how_it_was_measured(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result.get("device") or result["gpu"]
    assert re.match(r"\d+\.\d+", result["torch"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"]), "measure on a clean commit"
    program, script = result["command"].split()[:2]
    if program == "python":
        # the scripts were in bench/ when the older files were written
        assert (ROOT / script.replace("bench/", "benchmarks/")).exists() or (ROOT / script).exists(), script
    else:
        assert program == "nanorun"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_to_files_that_exist(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def quoted_code(page: Path) -> Iterator[tuple[str | None, str]]:
    """Python blocks of a page, each with the source file that the line before it names ("In `path`:"), if any."""
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: block.start()].rstrip().rpartition("\n")[2]
        named = re.findall(r"\b(?:nanorun|tests|benchmarks)/[\w/]+\.py\b", before)
        yield (named[-1] if named and before.endswith(":") else None), block[1]


def is_quoted_from(quote: str, source: str) -> bool:
    """Whether all lines of the quote follow one another in the source; a line `...` skips some, indentation is free."""
    lines, position = source.splitlines(), 0
    for part in re.split(r"^\s*(?:# )?\.\.\.\s*$", quote, flags=re.MULTILINE):
        wanted = textwrap.dedent(part).strip("\n")
        if not wanted:
            continue
        size = wanted.count("\n") + 1
        for start in range(position, len(lines) - size + 1):
            if textwrap.dedent("\n".join(lines[start : start + size])) == wanted:
                position = start + size
                break
        else:
            return False
    return True


def test_code_that_is_quoted_in_the_docs_is_in_the_tree():
    for page in PAGES:
        for path, quote in quoted_code(page):
            assert path or page.name != "architecture.md", (
                f"the line before it names no source file:\n{quote}"
            )
            if path:
                source = (ROOT / path).read_text(encoding="utf-8")
                assert is_quoted_from(quote, source), f"{page.name} quotes what is not in {path}:\n{quote}"


def test_a_quote_may_skip_lines_but_not_change_or_reorder_them():
    source = "def f():\n    a = 1\n    b = 2\n    return a + b\n"
    assert is_quoted_from("a = 1\nb = 2\n", source)
    assert is_quoted_from("def f():\n    a = 1\n    ...\n    return a + b\n", source)
    assert not is_quoted_from("a = 1\nreturn a + b\n", source)
    assert not is_quoted_from("return a + b\n...\na = 1\n", source)
    assert not is_quoted_from("a = 1\n    b = 2\n", source)


def test_the_limits_of_the_threat_model_are_those_of_the_code():
    page = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| [^|]+ \| ([\d,]+)( MiB)? \| `([\w.]+)` \|$", page.partition("## Limits")[2], re.MULTILINE
    )
    assert len(rows) == page.partition("## Limits")[2].count("\n|") - 2, (
        "every row names a value and its place"
    )
    for number, mib, name in rows:
        value = pkgutil.resolve_name(f"nanorun.{name}")
        unit = 2**20 if mib and not name.endswith("_MIB") else 1
        assert int(number.replace(",", "")) * unit == value, name


def test_uv_lock_has_the_versions_of_the_constraints_file():
    with (ROOT / "uv.lock").open("rb") as file:
        locked = {package["name"]: package["version"] for package in tomllib.load(file)["package"]}
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pins) > 50
    assert {name: locked.get(re.sub(r"[-_.]+", "-", name).lower()) for name, _ in pins} == dict(pins)
