"""How even the ranks are, as the first rank of a view says it and ``eep status`` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eep.experts.registry.directory_registry import Registry
from eep.experts.view_record import ViewRecord, read_record

_KEY = "balance"


class BalanceRecord(ViewRecord, frozen=True, forbid_unknown_fields=True):
    """``balancedness``: what an average rank has to do over what the busiest has, averaged over layers, and in the
    ``worst_layer``. ``doses``: how often experts have moved since the server started; ``moved``: how many did last."""

    balancedness: float
    worst_layer: float
    doses: int
    moved: int


def publish_balance(registry: Registry, record: BalanceRecord) -> None:
    registry.publish(_KEY, msgspec.json.encode(record))


def read_balance(experts: Path, epoch: int) -> dict[str, Any] | None:
    """For a process that is no rank. None while no rank has said it, as where experts do not move."""
    return read_record(experts, _KEY, BalanceRecord, epoch)
