"""What the instance could lose right now, as its first rank publishes it and ``eep status`` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eep.experts.registry.directory_registry import Registry
from eep.experts.view_record import ViewRecord, read_record

_KEY = "margin"


class MarginRecord(ViewRecord, frozen=True, forbid_unknown_fields=True):
    """The part of a :class:`~eep.experts.placement.margin.Margin` that an operator asks for."""

    any_ranks: int
    ranks: tuple[int, ...]
    repairable_ranks: int


def publish_margin(registry: Registry, record: MarginRecord) -> None:
    """Shows ``record`` in place of that of an earlier epoch, whichever rank wrote it."""
    registry.publish(_KEY, msgspec.json.encode(record))


def read_margin(experts: Path, epoch: int) -> dict[str, Any] | None:
    """The margin in ``epoch``, for a process that is no rank. None while no rank has said it."""
    return read_record(experts, _KEY, MarginRecord, epoch)
