"""What the instance could lose right now, as its first rank publishes it and ``eep status`` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eep.experts.placement.margin import find_margin
from eep.experts.registry.directory_registry import Registry
from eep.experts.standing import Standing
from eep.experts.view_record import ViewRecord, read_record

_KEY = "margin"


class MarginRecord(ViewRecord, frozen=True, forbid_unknown_fields=True):
    """The part of a :class:`~eep.experts.placement.margin.Margin` that an operator asks for."""

    any_ranks: int
    ranks: tuple[int, ...]
    repairable_ranks: int
    any_hosts: int | None = None
    """How many hosts, any of them, could go. None where there is one."""
    hosts: tuple[int, ...] = ()
    """The lowest active rank of each host that could go alone."""


def say_margin(registry: Registry, rank: int, standing: Standing) -> None:
    """All ranks know the same, so the first one of each host speaks, in the ``registry`` of that host."""
    view, hosts = standing.view, standing.base.topology
    if rank == min(each for each in view.active if hosts[each] == hosts[rank]):
        found = find_margin(standing.placement, view.active, hosts)
        told = MarginRecord(view.epoch, found.any_ranks, found.ranks, found.repairable_ranks)
        if standing.base.hosts:
            of_hosts = tuple(min(each for each in view.active if hosts[each] == host) for host in found.hosts)
            told = msgspec.structs.replace(told, any_hosts=found.any_hosts, hosts=of_hosts)
        publish_margin(registry, told)


def publish_margin(registry: Registry, record: MarginRecord) -> None:
    """Shows ``record`` in place of that of an earlier epoch, whichever rank wrote it."""
    registry.publish(_KEY, msgspec.json.encode(record))


def read_margin(experts: Path, epoch: int) -> dict[str, Any] | None:
    """The margin in ``epoch``, for a process that is no rank. None while no rank has said it."""
    return read_record(experts, _KEY, MarginRecord, epoch)
