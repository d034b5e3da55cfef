"""What a server says, as it may stand on a terminal: a control character is shown, and does nothing. Pure."""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_within(value: Any) -> Any:
    """The same for each text in what JSON can hold."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_within(each) for each in value]
    if isinstance(value, dict):
        return {printable_within(name): printable_within(each) for name, each in value.items()}
    return value
