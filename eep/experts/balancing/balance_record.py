"""How even the ranks are, as the first rank of a view says it and ``eep status`` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eep.experts.margin_record import HELD_DIRECTORY
from eep.experts.registry.directory_registry import DirectoryRegistry, Registry

_KEY = "balance"


class BalanceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``balancedness``: what an average rank has to do over what the busiest has, averaged over layers, and in the
    ``worst_layer``. ``doses``: how often experts have moved since the server started; ``moved``: how many did last."""

    epoch: int
    balancedness: float
    worst_layer: float
    doses: int
    moved: int


def publish_balance(registry: Registry, record: BalanceRecord) -> None:
    registry.publish(_KEY, msgspec.json.encode(record))


def read_balance(experts: Path, epoch: int) -> dict[str, Any] | None:
    """For a process that is no rank. None while no rank has said it, as where experts do not move."""
    path = experts / HELD_DIRECTORY
    if not path.is_dir():  # a registry would make it
        return None
    found = DirectoryRegistry(path).scan(_KEY).get(_KEY)
    try:
        record = msgspec.json.decode(found or b"null", type=BalanceRecord | None)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if record is None or record.epoch != epoch:
        return None
    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "epoch"}
