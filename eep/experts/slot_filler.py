"""Fills slots of one rank from wherever their experts are, and says what they hold by then.

No slot is given up before what is to fill it can be verified. A source that is stuck may still write into its slots later. So
these are not filled again before that read has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from eep import faults
from eep.experts.checksums import Checksums
from eep.experts.held_slots import HeldSlots
from eep.experts.layout import ExpertMemory
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair import checksum_sources
from eep.experts.repair.executor import RepairFailed, RepairReport, execute_repair, read_aside
from eep.experts.repair.reader import Reader
from eep.experts.repair.repair_plan import Origin, RepairPlan, Tier, Transfer, plan_repair
from eep.experts.repair.repair_sources import RepairSources
from eep.experts.repair.view_peers import PeerFinder, ViewPeers
from eep.long_work import wait_in_parts
from eep.view import View

logger = logging.getLogger(__name__)
Slot = tuple[int, int]
"""Its layer, and its number on this rank."""
_MOST_SETBACKS = 5
"""The log of a repair names at most so many."""


def _pass_point() -> None:
    faults.at("behind.reading")


def slots_of(transfers: Sequence[Transfer]) -> frozenset[Slot]:
    return frozenset((transfer.layer, transfer.slot) for transfer in transfers)


class SlotFiller:
    """``first`` says how many slots there are. ``topology``: the host of each rank that there may be."""

    def __init__(
        self,
        rank: int,
        first: Placement,
        memory: ExpertMemory,
        checksums: Checksums,
        slots: HeldSlots,
        sources: RepairSources,
        finder: PeerFinder,
        topology: Sequence[int],
    ) -> None:
        self.rank, self._first, self._memory, self._checksums = rank, first, memory, checksums
        self.slots, self._sources, self._finder, self._topology = slots, sources, finder, topology
        self.brought_in: Counter[Tier] = Counter()
        """Bytes of experts that came from elsewhere, so far."""
        self._lock = threading.Lock()
        """Held while a thread changes what the slots are said to hold."""
        self._late: dict[Future[Any], frozenset[Slot]] = {}
        """Reads for a repair that has failed. Each writes into slots, and must not do so once they are verified."""

    def peers(self, view: View) -> ViewPeers:
        return self._finder.find(view)

    def plan(self, view: View, after: Placement) -> RepairPlan:
        """What this rank lacks of ``after``, and where it is."""
        return plan_repair(
            self.slots.of(view, self._first),
            after,
            view.active,
            self._topology,
            self._memory.layout.expert_bytes,
            backups=self._sources.backups(),
            disk=self._sources.checkpoint is not None,
            readable=self._finder.readable,
        ).of(self.rank)

    def late_slots(self) -> frozenset[Slot]:
        """Those that reads of an earlier repair may still write into."""
        return frozenset().union(*self._still_late().values())

    def _still_late(self) -> dict[Future[Any], frozenset[Slot]]:
        with self._lock:
            self._late = {read: slots for read, slots in self._late.items() if not read.done()}
            return dict(self._late)

    def fill(self, view: View, steps: RepairPlan, within: float, stop: threading.Event | None = None) -> None:
        """Carries out ``steps``. RepairFailed if some expert did not arrive. With ``stop``, steps of the model go on, which
        use none of these slots; nothing is said of them once it is set."""
        deadline = time.monotonic() + within
        self._await_late(steps, within)
        checksum_sources.learn_for_transfers(self._checksums, steps.transfers, self._memory, self._sources)
        self._say(steps, stop, arrived=False)
        peers = self.peers(view)
        try:
            report = self._read(steps, peers, max(0.0, deadline - time.monotonic()), stop)
        except RepairFailed as error:
            with self._lock:
                self._late |= dict.fromkeys(error.still_reading, slots_of(error.transfers))
            raise
        finally:
            peers.close()
        self._say(steps, stop, arrived=True)
        self.brought_in += report.bytes_by_tier
        moved = ", ".join(f"{n >> 10} KiB from {tier}" for tier, n in report.bytes_by_tier.items())
        logger.info("epoch %d: %d experts brought in (%s)", view.epoch, len(steps.transfers), moved)
        for setback in report.setbacks[:_MOST_SETBACKS]:
            logger.info("epoch %d: %s; the next source was tried", view.epoch, setback)

    def publish(self) -> None:
        """Say what the slots hold by now."""
        with self._lock:
            self.slots.publish()

    def clear_from(self, slot: int) -> None:
        """These slots, and all after them, hold nothing any more."""
        with self._lock:
            self.slots.table[:, slot:] = EMPTY
            self.slots.publish()

    def set_stop(self, stop: threading.Event) -> None:
        """From now on no :meth:`fill` with this event says anything of its slots."""
        with self._lock:
            stop.set()

    def _await_late(self, steps: RepairPlan, within: float) -> None:
        mine = slots_of(steps.transfers)
        late = [read for read, slots in self._still_late().items() if slots & mine]
        if stuck := wait_in_parts(late, within)[1]:
            raise RepairFailed(
                f"{len(stuck)} sources still read into slots of this rank for an earlier repair",
                steps.transfers,
                tuple(stuck),
            )

    def _say(self, steps: RepairPlan, stop: threading.Event | None, *, arrived: bool) -> None:
        with self._lock:
            if stop is not None and stop.is_set():
                raise RepairFailed("this repair was stopped", steps.transfers)
            for transfer in steps.transfers:
                self.slots.table[transfer.layer, transfer.slot] = transfer.expert if arrived else EMPTY
            if arrived and stop is None:
                return  # the caller says so when all of a repair is done
            self.slots.publish()

    def _read(self, steps: RepairPlan, peers: ViewPeers, timeout: float, stop: threading.Event | None) -> RepairReport:
        def reader_of(origin: Origin) -> Reader:
            return self._sources.reader_of(origin, self._memory, peers)

        if stop is None:
            return execute_repair(steps, self.rank, self._memory, reader_of, self._checksums, timeout=timeout)
        return read_aside(
            steps,
            [self._memory.pieces(transfer.layer, transfer.slot) for transfer in steps.transfers],
            self._memory,
            reader_of,
            self._checksums,
            timeout=timeout,
            passed=_pass_point,
            stop=stop,
        )
