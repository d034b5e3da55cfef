"""The fields of a query, by name: SGLang and a bare application would each refuse wrong ones in a form of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from eep.errors import EepError

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_LONGEST = 64
"""Numbers and ids are shorter."""


class BadQuery(EepError, ValueError):
    """A field of a query is wrong. Nothing was changed."""


def number_in(query: Mapping[str, str], name: str, default: float, least: float, most: float) -> float:
    text = query.get(name, str(default))
    try:
        number = float(text[: _LONGEST + 1])
    except ValueError:
        number = least - 1
    if not (least <= number <= most and len(text) <= _LONGEST):  # which no NaN is
        raise BadQuery(f"'{name}' is a number from {least:g} to {most:g}, not {text[:_LONGEST]!r}")
    return number


def count_in(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """The same for a whole number."""
    number = number_in(query, name, default, least, most)
    if number != int(number):
        raise BadQuery(f"'{name}' is a whole number, not {query[name]!r}")
    return int(number)


def flag_in(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = query.get(name, str(default)).lower()
    if text not in _FLAGS:
        raise BadQuery(f"'{name}' is true or false, not {text[:_LONGEST]!r}")
    return _FLAGS[text]


def ident_in(query: Mapping[str, str], name: str) -> str:
    """An id; empty if there is none."""
    text = query.get(name, "")
    if len(text) > _LONGEST:
        raise BadQuery(f"'{name}' has at most {_LONGEST} characters")
    return text
