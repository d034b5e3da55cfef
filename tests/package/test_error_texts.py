"""The pages about trouble have an entry for every text by which EEP says that something is wrong, and every kind of event."""

from __future__ import annotations

import ast
import re

import pytest

from tests.package import said_texts
from tests.package.said_texts import ROOT, SHORTEST, length
from tests.package.test_reference import section

PAGE = (ROOT / "docs" / "troubleshoot.md").read_text()
LIBRARY = (ROOT / "docs" / "troubleshoot-library.md").read_text()


def quotes(page: str) -> list[list[str]]:
    """The fixed parts of each text that a page quotes."""
    plain = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    quoted = [quote.replace("\\|", "|") for quote in re.findall(r"`([^`]+)`", plain)]
    parts = [[part.strip() for part in quote.split("…") if part.strip(" :")] for quote in quoted]
    return [each for each in parts if length("".join(each)) >= SHORTEST]


def is_quoted(text: str, known: list[list[str]]) -> bool:
    """Whether all parts of one quote stand in the text, in their order."""
    for parts in known:
        at = 0
        for part in parts:
            at = text.find(part, at)
            if at < 0:
                break
            at += len(part)
        else:
            return True
    return False


def test_texts_and_quotes_are_found() -> None:
    assert len(said_texts.texts()) > 300
    assert len(quotes(PAGE)) > 200
    assert is_quoted("rank … lost its …", [["rank", "lost"]])
    assert not is_quoted("lost rank", [["rank", "lost"]])


@pytest.mark.parametrize(
    "text",
    [
        *("the request was not sent within … s", "only the server itself can …: ask it by its URL"),
        *("no step has been committed for … s: the ranks settle in a view", "… of … ranks are in"),
        *("it is not known yet which ranks are in", "the server ends: …; try again", "NVML does not answer: …"),
        *("--url …: write it like http://127.0.0.1:30000", "etcd at … did not answer … within … s"),
        "the server has … open requests, and --max-queued-requests allows no more",
        *("rank … has not come", "the server does not say where it serves HTTP; give --url"),
    ],
)
def test_texts_of_every_kind_are_found(text: str) -> None:
    assert text in said_texts.texts()


def test_a_text_with_alternatives_is_each_of_them() -> None:
    tree = ast.parse("def f():\n    why = 'one' if a else 'two'\n    raise E(why or f'{x} is three')")
    (made,) = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    assert isinstance(made, ast.Call)
    assert said_texts.alternatives(made.args[0], said_texts.assignments(tree)) == {"one", "two", "… is three"}


def test_every_error_that_is_raised_is_of_a_class_that_is_looked_for() -> None:
    listed = (*said_texts.BY_TEXT, *said_texts.BY_NAME, *said_texts.OF_PYTHON, *said_texts.MAKERS)
    assert len(listed) == len(set(listed))
    private = {name for name in said_texts.classes() if name.startswith("_")}  # never leaves its module
    assert sorted((said_texts.raised() | said_texts.classes().keys()) - private - set(listed)) == []
    assert sorted(set(listed) - said_texts.raised() - said_texts.classes().keys()) == []


def test_every_error_text_has_an_entry() -> None:
    known = quotes(PAGE) + quotes(LIBRARY)
    assert sorted(text for text in said_texts.texts() if not is_quoted(text, known)) == []


def test_every_class_of_reasons_has_an_entry() -> None:
    described = set(re.findall(r"^\| `(\w+)`", LIBRARY, re.MULTILINE))
    assert sorted(set(said_texts.BY_NAME) - described) == []


def test_every_kind_of_event_has_an_entry() -> None:
    phases = {kind for kind, _ in said_texts.events()}
    assert {"FENCING", "EVIDENCE", "KEEPER", "NO-ROOM", "SPARE"} <= phases
    table = PAGE.split("\n### In the event log\n")[1].split("\n### ")[0]
    for where, text in (("troubleshoot.md", table), ("reference.md", section("## Event log"))):
        described = set(re.findall(r"`([A-Z-]+)`", text))
        assert sorted(phases - described) == [], where


def test_every_cause_of_an_event_has_an_entry() -> None:
    causes = {cause for _, cause in said_texts.events() if length(cause) >= SHORTEST}
    assert "rank … was killed but does not end; it is out, and not replaced until it ends" in causes
    known = quotes(PAGE)
    assert sorted(cause for cause in causes if not is_quoted(cause, known)) == []
