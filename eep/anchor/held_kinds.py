"""What the memory is for that the keeper of a server holds, by the names that ranks give it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

KINDS = ("weights", "contexts", "context-copies", "other")
_OF = {
    **dict.fromkeys(("weights", "experts", "slots"), "weights"),
    **dict.fromkeys(("kv", "rows", "journal", "kv-budget"), "contexts"),
    "kv-copy": "context-copies",
}
_DENSE = "dense-"
"""The names of weights that ranks share begin so."""


def kind_of_held(name: str) -> str:
    """One of :data:`KINDS`. Of memory that is held in parts, each has a number behind the name."""
    return "weights" if name.startswith(_DENSE) else _OF.get(name.partition(".")[0], "other")


def sum_held(held: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of each of the :data:`KINDS`, from the ``anchored`` memory of a status."""
    found = Counter(dict.fromkeys(KINDS, 0))
    for each in held:
        found[kind_of_held(each["name"])] += each["size"]
    return dict(found)
