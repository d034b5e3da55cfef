"""Regular expressions that end an answer: none that is let through keeps a rank busy."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.front_end.stop_patterns import LONGEST_MATCH, MOST_WAYS, check_patterns


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression: missing \\)"),
        ("a**", "is no regular expression: multiple repeat"),
        ("a{99999999999}", "is no regular expression"),
        ("(" * 100 + ")" * 100 + "(" * 60, "is .* long|is no regular expression"),
        ("x" * 257, "257 bytes long"),
        ("é" * 129, "258 bytes long"),
        ("a*", "without an end"),
        ("a+?", "without an end"),
        ("a{3,}", "without an end"),
        ("(a+)+$", "without an end"),
        ("(?:a|a)*b", "without an end"),
        (f"a{{{LONGEST_MATCH + 1}}}", f"more than {LONGEST_MATCH} characters"),
        ("(?:a{100}){100}", f"more than {LONGEST_MATCH} characters"),
        ("(?:){99999}", f"more than {LONGEST_MATCH} characters"),
        ("(?:a{1,9}){1,9}b", f"more than {MOST_WAYS} ways"),
        ("(?:a|a){30}b", f"more than {MOST_WAYS} ways"),
        ("a?" * 20 + "b", f"more than {MOST_WAYS} ways"),
        ("(?=(?:a|a){20}b)", f"more than {MOST_WAYS} ways"),
        ("(?:a|a){9}c|x{900}", "513 ways to match up to 900 characters"),
        (r"(a)\1", "refer back to a group"),
        ("(a)?(?(1)b|c)", "refer back to a group"),
    ],
)
def test_a_pattern_that_may_take_too_long_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^stop_regex .*{why}"):
        check_patterns([pattern])


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "",
            "x",
            "and | or",
            r"[.!?]\s{0,10}$",
            r"(?i)\bstop\b",
            r"\d{3}-\d{4}",
            r"Answer: \d{1,20}",
            "(?:ab|cd){1,3}",
        ),
        *(
            r"(?<=\n)User:",
            "(?s:.{0,100})",
            "a?b?c?",
            "(?>a{1,3})b{1,5}+",
            "[^\n]{1,100}\n\n",
            r"\d{1,20}-\d{1,20}",
            "x" * 256,
        ),
    ],
)
def test_a_pattern_that_ends_soon_is_let_through(pattern: str) -> None:
    check_patterns([pattern])


def test_the_ways_of_all_patterns_count_together() -> None:
    check_patterns(["a{1,20}b{1,20}"])
    with pytest.raises(ValueError, match="800 ways to match up to 40 characters"):
        check_patterns(["a{1,20}b{1,20}"] * 2)
    with pytest.raises(ValueError, match="33 patterns"):
        check_patterns(["x"] * 33)


atoms = st.sampled_from(["a", "b", ".", "[ab]", "^", "$", r"\b"])
numbers = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: f"{{{min(pair)},{max(pair)}}}")
repeats = st.one_of(st.sampled_from(["?", "*", "+", "??"]), numbers)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(pattern=patterns)
def test_what_is_let_through_ends_on_a_text_that_was_made_for_it(pattern: str) -> None:
    """A pattern that got past the check by mistake would run until the test is ended."""
    try:
        check_patterns([pattern + "c"])
    except ValueError:
        return
    re.search(pattern + "c", "a" * (2 * LONGEST_MATCH) + "b")
