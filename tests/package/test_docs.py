"""The pages are guides: lines wrap, links lead somewhere, and what was measured when stands in bench/results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 100
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "bench" / "results").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Its lines with their numbers; not those of tables and of code."""
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield number, line


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_lines_wrap(page: Path) -> None:
    assert [number for number, line in prose(page) if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_page_names_a_commit(page: Path) -> None:
    """A word of hexadecimal digits with a letter and a number in it."""
    words = re.findall(r"(?<![\w/.-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}(?![\w.-])", page.read_text())
    assert words == []


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=ids)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_links_are_found() -> None:
    """Else the test above would look at none."""
    links = [link for page in PAGES for link in LINK.findall(page.read_text())]
    assert len(links) > 50
    assert any("#" in link and "://" not in link for link in links)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_sources_name_pages_that_are_there() -> None:
    named = {
        (path, name)
        for folder in ("eep", "eep_cuda", "sglang_patches", "tests", "bench", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())
    }
    assert named
    assert [f"{path}: {name}" for path, name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_quoted_texts_are_in_the_sources() -> None:
    """What stands in the first column of a table of error texts, between the places of names and numbers."""
    said = " ".join(strings("eep", "sglang_patches"))
    section = (ROOT / "docs" / "troubleshoot.md").read_text().split("\n## By error text\n")[1]
    section += (ROOT / "docs" / "troubleshoot-library.md").read_text()
    quoted = [
        quote for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for quote in re.findall(r"`(.+?)`", row)
    ]
    assert len(quoted) > 50
    parts = [part.strip(" ;:()='").replace("\\|", "|") for quote in quoted for part in quote.split("…")]
    assert [part for part in parts if part not in said] == []


def strings(*folders: str) -> Iterator[str]:
    """Every string of the sources, and the fixed parts of those that are put together; and names of classes."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.ClassDef):
                    yield node.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_named_files_are_there(page: Path) -> None:
    """Whole paths in the repository, such as eep/view.py."""
    named = re.findall(r"`((?:eep|eep_cuda|sglang_patches|tests|bench|examples|docs)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
