"""Which regular expressions may end an answer (``stop_regex``).

A rank searches the end of the answer for them at every token, and tries every way in which they can match. A pattern with too
many ways, or one that can match any number of characters, would keep the rank, and with it all others, busy for minutes. So a
pattern is parsed, and the ways and characters that it allows for are counted: a search then takes some milliseconds, whatever
the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MOST_PATTERNS = 32
MOST_BYTES = 256
LONGEST_MATCH = 1000
"""Characters. The part of the answer that is searched is about as many tokens long."""
MOST_WAYS = 1000
"""In which all patterns of a request may match at one place, together."""
MOST_WORK = 20_000
"""Ways times characters of the longest match: the longer that is, the more of the answer is searched."""

_CHARACTERS = frozenset(("LITERAL", "NOT_LITERAL", "ANY", "IN"))
_REPEATS = frozenset(("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"))
_LOOKS = frozenset(("ASSERT", "ASSERT_NOT"))


def check_patterns(patterns: Sequence[str]) -> None:
    """ValueError if a rank may take too long to look for one of ``patterns``."""
    if len(patterns) > MOST_PATTERNS:
        raise ValueError(f"stop_regex must have {MOST_PATTERNS} patterns at most, and has {len(patterns)} patterns")
    ways, longest = 0, 0
    for pattern in patterns:
        if (size := len(pattern.encode(errors="surrogatepass"))) > MOST_BYTES:
            raise ValueError(f"stop_regex must be of {MOST_BYTES} bytes at most, and is {size} bytes long")
        try:
            parsed = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"stop_regex must be a regular expression, and is no regular expression: {error}"
            ) from None
        more, length = _measure(parsed)
        ways, longest = _bounded_ways(ways + more), max(longest, length)
    if ways * longest > MOST_WORK:
        raise ValueError(
            f"stop_regex must not take long to look for: it has {ways} ways to match up to {longest} characters, and the "
            f"product of both may be {MOST_WORK} at most; lower its numbers of repeats"
        )


def _measure(parsed: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """In how many ways a parsed pattern can match at one place, and how many characters at most."""
    ways, longest = 1, 0
    for code, value in parsed:
        more, length = _measure_part(str(code), value)
        ways, longest = _bounded_ways(ways * more), _bounded_length(longest + length)
    return ways, longest


def _measure_part(name: str, value: Any) -> tuple[int, int]:
    if name in _CHARACTERS:
        return 1, 1
    if name == "AT":
        return 1, 0
    if name == "SUBPATTERN" or name in _LOOKS:
        return _measure(value[-1])
    if name == "ATOMIC_GROUP":
        return _measure(value)
    if name == "BRANCH":
        branches = [_measure(branch) for branch in value[1]]
        return sum(ways for ways, _ in branches), max(length for _, length in branches)
    if name in _REPEATS:
        return _measure_repeat(*value)
    raise ValueError(f"stop_regex must not refer back to a group, or do anything else that cannot be bounded ({name})")


def _measure_repeat(least: int, most: Any, inner: Any) -> tuple[int, int]:
    if most is _parser.MAXREPEAT:
        raise ValueError(
            "stop_regex must not repeat without an end, as with *, + or {n,}: write the most repeats, such as {1,20} for +"
        )
    ways, length = _measure(inner)
    longest = _bounded_length(most * max(length, 1))
    total = 0
    for count in range(least, most + 1):
        total = _bounded_ways(total + ways**count)
    return total, longest


def _bounded_ways(ways: int) -> int:
    if ways > MOST_WAYS:
        raise ValueError(
            f"stop_regex must not have more than {MOST_WAYS} ways to match: use fewer repeats and alternatives, and none "
            "within a repeat"
        )
    return ways


def _bounded_length(length: int) -> int:
    if length > LONGEST_MATCH:
        raise ValueError(
            f"stop_regex must not match more than {LONGEST_MATCH} characters: lower its numbers of repeats"
        )
    return length
