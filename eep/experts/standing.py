"""What counts for a rank while it serves: its view, the placement of that view, and what the log calls it."""

from __future__ import annotations

from dataclasses import dataclass

from eep.experts.balancing.placement_log import BaseRecord, LogName
from eep.experts.placement.open_slots import count_open, narrow, widen
from eep.experts.placement.shadows import choose_routed
from eep.experts.placement.slot_plan import Placement, WhenShort, plan_placement
from eep.view import View


@dataclass(frozen=True, eq=False)
class Standing:
    """``placement`` is what ``base``, which is for every rank that there may be, gives in ``view``."""

    view: View
    name: LogName
    base: BaseRecord
    placement: Placement

    @property
    def next_name(self) -> LogName:
        return LogName(self.name.epoch, self.name.number + 1)


def place(view: View, base: BaseRecord, when_short: WhenShort = "refuse") -> Placement:
    """The placement of a view: ``base`` with the fewest moves. Raises CoverageError if slots are short and may not be."""
    full, slots = base.placement, base.slots_per_rank
    if base.open_slots:
        slots = count_open(base.experts, len(view.active), base.open_slots, base.slots_per_rank)
    placed = plan_placement(
        base.demand,
        narrow(full, slots),
        view.active,
        slots,
        base.topology,
        when_short=when_short,
        least_copies=base.least_copies,
    )
    return widen(placed, base.slots_per_rank)


def route(placement: Placement, base: BaseRecord) -> Placement:
    """The copies of ``placement`` to which tokens go: all, or where experts have copies for a loss those that help."""
    return placement if base.least_copies == 1 else choose_routed(placement, base.demand)
