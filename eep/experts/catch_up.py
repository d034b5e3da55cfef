"""Brings in behind the steps what a rank lacks of the placement of its view, a few experts at a time.

A slot to which no token goes may be written while steps run. So an expert is read straight into its slot, and verified there.
Ranks tell each other now and then what has arrived, and serve it from the same step on (:mod:`.catch_up_turns`).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import numpy as np

from eep import faults
from eep.errors import EepError
from eep.experts.placement.packing import EMPTY, BoolArray, FloatArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair.repair_plan import RepairPlan, Tier, Transfer
from eep.experts.slot_filler import Slot, SlotFiller, slots_of
from eep.view import View

logger = logging.getLogger(__name__)
_AT_ONCE = 4
"""Experts. Few, since each is served only when all of them are there; several, since sources can work side by side."""
_TRIES_EVERY_S = 5.0
"""How long it waits when no source had an expert: a backup may come back."""
_ENDS_WITHIN_S = 0.3


def split(steps: RepairPlan, busy: frozenset[Slot]) -> tuple[RepairPlan, RepairPlan]:
    """What memory has, of this rank or of a peer, and the rest. Slots that are ``busy`` belong to the rest. What is to come
    from memory comes from nowhere else."""
    fast, slow = [], []
    for transfer in steps.transfers:
        memory = tuple(origin for origin in transfer.origins if origin.tier <= Tier.PEER)
        if memory and (transfer.layer, transfer.slot) not in busy:
            fast.append(replace(transfer, origins=memory))
        else:
            slow.append(transfer)
    return RepairPlan(tuple(fast), steps.expert_bytes), RepairPlan(tuple(slow), steps.expert_bytes)


def in_order(transfers: tuple[Transfer, ...], asked: FloatArray) -> list[Transfer]:
    """Those that gates ask for most come first, whatever their layer."""
    return sorted(transfers, key=lambda transfer: -float(asked[transfer.layer, transfer.expert]))


class CatchUp:
    """Of one rank in one view. ``asked[layer, expert]``: how often gates ask for each. ``within``: how many seconds a source
    may take for a few experts. ``last``: that of the view before, which was told to end."""

    def __init__(
        self,
        filler: SlotFiller,
        view: View,
        after: Placement,
        asked: FloatArray,
        within: float,
        last: CatchUp | None = None,
    ) -> None:
        self._filler, self._view, self._after, self._asked, self._within = filler, view, after, asked, within
        rank = filler.rank * after.slots_per_rank
        self._mine = after.physical_to_logical[:, rank : rank + after.slots_per_rank]
        self._stop, self._done = threading.Event(), threading.Event()
        self._under_way: frozenset[Slot] = frozenset()
        self._last = None if last is None or not last.is_alive else last
        self._thread = threading.Thread(target=self._run, name=f"eep-behind-{filler.rank}", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy(self) -> frozenset[Slot]:
        """The slots into which something may still be read."""
        return self._under_way if self.is_alive else frozenset()

    def held(self) -> BoolArray:
        """``[layer, slot]``: what has arrived so far."""
        return np.asarray((self._mine != EMPTY) & (self._filler.slots.table == self._mine))

    @property
    def lacks(self) -> bool:
        return bool((self.held() != (self._mine != EMPTY)).any())

    def start(self, until: float) -> None:
        """Returns when all has arrived, or at that moment at the latest."""
        if not self.lacks:
            return
        self._thread.start()
        self._done.wait(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """From now on it changes nothing that counts. What is being read may still be written to its slots."""
        self._filler.set_stop(self._stop)
        if self._thread.is_alive():
            self._thread.join(_ENDS_WITHIN_S)

    def _run(self) -> None:
        try:
            if self._last is not None:
                self._last._thread.join()
                self._last = None
            while not self._stop.is_set() and self.lacks:
                self._try_all()
                if self.lacks:
                    self._stop.wait(_TRIES_EVERY_S)
        except Exception:
            logger.exception("rank %d brings in no more experts behind its steps in this view", self._filler.rank)
        finally:
            self._done.set()

    def _try_all(self) -> None:
        steps = self._filler.plan(self._view, self._after)
        waiting = in_order(steps.transfers, self._asked)
        told = ""
        while waiting and not self._stop.is_set():
            few, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            self._under_way = slots_of(few)
            try:
                self._filler.fill(self._view, RepairPlan(tuple(few), steps.expert_bytes), self._within, self._stop)
            except (EepError, OSError) as error:
                if not self._stop.is_set() and str(error) != told:
                    logger.warning("epoch %d: experts stay away for now: %s", self._view.epoch, error)
                told = str(error)
            else:
                faults.at("behind.arrived")
            finally:
                self._under_way = frozenset()
