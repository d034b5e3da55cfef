"""What the first rank of a view says of the instance, for processes that are no ranks.

The ranks know the placement, the supervisor does not. So a record lies in the registry in which ranks say what they hold. It
goes with its writer, and the next view has another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eep.experts.registry.directory_registry import DirectoryRegistry

HELD_DIRECTORY = "held"
"""Below the directory of the experts: the registry in which ranks say what they hold."""


class ViewRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of one epoch."""

    epoch: int


def read_record(experts: Path, key: str, kind: type[ViewRecord], epoch: int) -> dict[str, Any] | None:
    """The fields of the record in ``epoch``. None while no rank has said it."""
    path = experts / HELD_DIRECTORY
    if not path.is_dir():  # a registry would make it
        return None
    found = DirectoryRegistry(path).scan(key).get(key)
    try:
        record = None if found is None else msgspec.json.decode(found, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if record is None or record.epoch != epoch:
        return None
    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "epoch"}
