"""A repair that does not wait for slow sources: a view begins with what has arrived. The rest comes in behind its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from eep.experts.arrivals import Arrivals, pack, part_of
from eep.experts.catch_up import CatchUp, split
from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair.executor import RepairFailed
from eep.experts.repair.repair_plan import RepairPlan
from eep.experts.slot_filler import SlotFiller
from eep.view import View

logger = logging.getLogger(__name__)
_TOLD_WITHIN_S = 20.0
"""How much longer than itself a rank waits for others to say what has arrived."""


class PartialRepair:
    """Of one rank. ``mask_after``: how many seconds a view may wait for slow sources. ``repair_within``: how many it may take
    to copy what memory has. ``asked()``: how often gates ask for each expert."""

    def __init__(
        self,
        filler: SlotFiller,
        arrivals: Arrivals,
        mask_after: float,
        repair_within: float,
        asked: Callable[[], FloatArray],
    ) -> None:
        self._filler, self._arrivals, self._asked = filler, arrivals, asked
        self._mask_after, self._repair_within = mask_after, repair_within
        self._behind: CatchUp | None = None
        arrivals.take_room()

    def bring_in(self, view: View, after: Placement, steps: RepairPlan) -> Placement | None:
        """What memory has comes in now, the rest as far as there is time. Returns what all ranks have of ``after`` by then,
        and ``after`` itself if that is all of it. None if a rank did not say what it has."""
        until = time.monotonic() + self._mask_after
        busy = frozenset() if self._behind is None else self._behind.busy
        fast, _ = split(steps, busy | self._filler.late_slots())
        try:
            if fast.transfers:
                self._filler.fill(view, fast, self._repair_within)
        except RepairFailed as error:
            logger.warning("epoch %d: experts are brought in behind the steps: %s", view.epoch, error)
        self._behind = CatchUp(self._filler, view, after, self._asked(), self._repair_within, self._behind)
        self._behind.start(until)
        peers = self._filler.peers(view)
        try:
            heard = self._arrivals.exchange(view, self.arrived(), peers.alive, self._mask_after + _TOLD_WITHIN_S)
        finally:
            peers.close()
        if heard is None:
            logger.warning("epoch %d: a rank did not say what it holds; no step runs in this epoch", view.epoch)
            return None
        return part_of(after, heard)

    def arrived(self) -> bytes:
        """What this rank holds by now of the placement of the view."""
        assert self._behind is not None
        return pack(self._behind.held())

    @property
    def lacks(self) -> bool:
        """Whether this rank has yet to bring something in."""
        return self._behind is not None and self._behind.lacks

    def stop(self) -> None:
        """The view is over: nothing more is brought in for it."""
        if self._behind is not None:
            self._behind.stop()
