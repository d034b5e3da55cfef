"""What the instance could lose right now, as its first rank publishes it and ``eep status`` shows it.

The ranks know the placement, the supervisor does not. So the first rank of a view says the margin in the registry in which
ranks say what they hold. The record goes with its writer, and the next view has another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eep.experts.registry.directory_registry import DirectoryRegistry, Registry

HELD_DIRECTORY = "held"
"""Below the directory of the experts: the registry in which ranks say what they hold."""
_KEY = "margin"


class MarginRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a :class:`~eep.experts.placement.margin.Margin` that an operator asks for, and its epoch."""

    epoch: int
    any_ranks: int
    ranks: tuple[int, ...]
    repairable_ranks: int


def publish_margin(registry: Registry, record: MarginRecord) -> None:
    """Shows ``record`` in place of that of an earlier epoch, whichever rank wrote it."""
    registry.publish(_KEY, msgspec.json.encode(record))


def read_margin(experts: Path, epoch: int) -> dict[str, Any] | None:
    """The margin in ``epoch``, for a process that is no rank. None while no rank has said it."""
    path = experts / HELD_DIRECTORY
    if not path.is_dir():  # a registry would make it
        return None
    found = DirectoryRegistry(path).scan(_KEY).get(_KEY)
    try:
        record = msgspec.json.decode(found or b"null", type=MarginRecord | None)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if record is None or record.epoch != epoch:
        return None
    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "epoch"}
