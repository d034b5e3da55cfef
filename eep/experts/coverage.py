"""Coverage: every expert stays on an active rank, view after view.

The placement of a view is a pure function of the ranks in it. It starts from the placement of the launch, where no rank is
missing, and makes the fewest moves. So all ranks, a joiner included, make the same one without talking. When all ranks are
back, so is the first placement. Where experts move to even out the ranks, a log has what the placement of a view starts from.

Each rank brings in what it lacks: from another slot of its own, from the memory of a peer, from a backup in host memory, from
the checkpoint. Ranks say in a registry what they hold. A record may be a moment old, and a peer may overwrite a slot while it
is read. So the reader verifies every expert by its checksum, and takes one that does not verify from the next source.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from eep import faults
from eep.access import make_private
from eep.data_plane.memory import Memory
from eep.errors import EepError
from eep.experts.agreed_load import AgreedLoad
from eep.experts.backup.live_offer import LiveOffer
from eep.experts.balancing.placement_log import BaseRecord, LogName, PlacementLog
from eep.experts.balancing.staging import Staged, StagingArea
from eep.experts.checksums import Checksums
from eep.experts.held_slots import HeldSlots
from eep.experts.layout import ExpertMemory
from eep.experts.margin_record import MarginRecord, publish_margin
from eep.experts.placement.margin import find_margin
from eep.experts.placement.packing import EMPTY, FloatArray, IntArray
from eep.experts.placement.slot_plan import CoverageError, Placement, WhenShort
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.registry.published_records import ModelShape
from eep.experts.repair import checksum_sources
from eep.experts.repair.executor import RepairFailed, execute_repair
from eep.experts.repair.peer_memory import MappedPeers, copy_all, serve_region
from eep.experts.repair.repair_plan import RepairPlan, Tier, plan_repair
from eep.experts.repair.repair_sources import RepairSources
from eep.experts.slot_index import SlotIndex
from eep.experts.standing import Standing, place, route
from eep.experts.view_record import HELD_DIRECTORY
from eep.recovery.contract import check_coverage
from eep.view import View

logger = logging.getLogger(__name__)
LACKING = 0
"""In place of a digest; see :data:`eep.recovery.session.Repair`."""
_MOST_SETBACKS = 5
"""The log of a repair names at most so many."""


@dataclass(frozen=True, slots=True)
class LoadedExperts:
    """What an incarnation of a rank has loaded: ``memory``, in ``shared``, with the experts that ``placement`` gives it, or
    those that ``held[layer, slot]`` says if an earlier life has left them there. ``index`` is for the next life. ``aside`` is
    memory for experts that move while the rank serves; None: none ever does."""

    rank: int
    incarnation: int
    placement: Placement
    memory: ExpertMemory
    shared: Memory
    checksums: Checksums
    device: str = "cpu"
    held: IntArray | None = None
    index: SlotIndex | None = None
    aside: ExpertMemory | None = None


@dataclass(frozen=True, slots=True)
class CoveragePolicy:
    """A repair that takes longer than ``repair_within`` seconds has failed.

    ``counted`` says how often this rank asked for each expert. Where experts must be masked, those asked for least are.
    ``least_copies``: how many copies each expert has, where slots allow, before any has more. With 2, any one rank may go.
    """

    repair_within: float
    when_short: WhenShort = "refuse"
    counted: Callable[[], FloatArray] | None = None
    least_copies: int = 1


class Coverage:
    """Covers the experts of one rank. It calls ``published`` with each new placement, once all experts of it are there, and
    with that part of it to which tokens go."""

    def __init__(
        self,
        loaded: LoadedExperts,
        directory: Path,
        published: Callable[[Placement, Placement], None],
        policy: CoveragePolicy,
        sources: RepairSources | None = None,
        offer: LiveOffer | None = None,
    ) -> None:
        """``directory`` is private, and shared by the ranks of this host. ``offer`` is told what the slots hold."""
        make_private(directory)
        rank, first = loaded.rank, loaded.placement
        self._rank = rank
        self._first, self._memory, self._checksums = first, loaded.memory, loaded.checksums
        self._directory, self._published, self._device = directory, published, loaded.device
        self._policy, self._sources, self._offer = policy, sources or RepairSources(), offer
        self._base = BaseRecord.of(first, self._no_load(), 0, policy.least_copies)
        self.log = self.stage = None
        if loaded.aside is not None:
            self.log = PlacementLog(directory / "placements")
            self.log.enter(0, self._base)  # its room on the disk is taken now
            self.stage = StagingArea(
                rank, loaded.memory, loaded.aside, loaded.checksums, self._sources, directory, loaded.device
            )
        self.standing: Standing | None = None
        """None while this rank does not serve."""
        size = first.slots_per_rank
        first_held = first.physical_to_logical[:, rank * size : (rank + 1) * size]
        self.registry = DirectoryRegistry(directory / HELD_DIRECTORY)
        """In which ranks tell each other what they hold, and what they have counted."""
        self.registry.sweep()  # its keys name an incarnation, so none is ever used again
        self._slots = HeldSlots(
            self.registry,
            (rank, loaded.incarnation),
            first_held if loaded.held is None else loaded.held,
            ModelShape.of(loaded.memory.layout, first.experts),
            loaded.checksums,
            loaded.index,
            offer,
        )
        self._load = AgreedLoad(self.registry, rank, loaded.incarnation, policy.counted or self._no_load)
        if policy.when_short == "mask":
            self._load.take_room()
        self._degraded = False
        self._late: tuple[Future[Any], ...] = ()
        """Reads for a repair that has failed. Each writes into slots, and must not do so once they are verified."""
        self._server = serve_region(directory, rank, loaded.incarnation, loaded.shared)
        self.brought_in: Counter[Tier] = Counter()
        """Bytes of experts that came from elsewhere, so far."""
        self._slots.publish()

    def placement_of(self, view: View) -> Placement | None:
        """Where experts are to be in a view. None if its ranks cannot hold them all, and must wait for others."""
        if self.log is not None:
            self._base = self.log.enter(view.epoch, self._base)
        try:
            return place(view, self._base)
        except CoverageError as error:
            if self._policy.when_short == "refuse":
                logger.warning("epoch %d: %s; no step runs until a rank comes back", view.epoch, error)
                return None
        peers = MappedPeers(self._directory, view, self._memory.layout.region_bytes, self._device)
        try:
            load = self._load.of(view, peers.alive)
        finally:
            peers.close()
        if load is None:
            logger.warning(
                "epoch %d: rank %d did not say which experts are used least; no step runs in this epoch",
                view.epoch,
                min(view.active),
            )
            return None
        return place(view, BaseRecord.of(self._base.placement, load, self._base.doses, self._base.least_copies), "mask")

    def repair(self, view: View) -> int | None:
        """Makes this rank's part of the placement of ``view``. Returns the placement's digest, or None if there is none.

        ``LACKING`` if no source has some experts of this rank. The rank stays: the next joiner brings what it loads when it
        starts, and a rank that ended instead would take with it what its peers may need.
        """
        self.standing = None
        after = self.placement_of(view)
        if after is None:
            return None
        before = self._slots.of(view, self._first)
        steps = plan_repair(
            before,
            after,
            view.active,
            [0] * after.max_ranks,
            self._memory.layout.expert_bytes,
            backups=self._sources.backups(),
            disk=self._sources.checkpoint is not None,
        ).of(self._rank)
        if steps.transfers:
            try:
                self._bring_in(view, steps)
            except RepairFailed as error:
                if np.array_equal(after.physical_to_logical, self._first.physical_to_logical):
                    self._slots.forget()
                    raise  # this rank lacks what it was started with, and its next incarnation loads that
                logger.warning("epoch %d: no step runs until another rank joins: %s", view.epoch, error)
                return LACKING
        self._slots.publish()
        faults.at("repair.done")
        check_coverage(view, after)
        self._published(after, route(after, self._base))
        self._say_what_is_masked(view, after)
        self._say_margin(view, after)
        self.standing = Standing(view, LogName(view.epoch, 0), self._base, after)
        return int(after.digest[:16], 16)

    def switch(self, staged: Staged) -> None:
        """Between two steps: serve by the placement for which this rank and all others have staged what moves."""
        if staged.standing is not self.standing or self.standing is None:
            raise EepError("what was staged is for another placement than the one in force; nothing was changed")
        view, table = self.standing.view, self._slots.table
        for transfer in staged.transfers:
            table[transfer.layer, transfer.slot] = EMPTY
        self._slots.note()
        pieces = [self._memory.pieces(transfer.layer, transfer.slot) for transfer in staged.transfers]
        copy_all(list(chain.from_iterable(pieces)), list(chain.from_iterable(staged.places)))
        faults.at("balance.written")
        for transfer in staged.transfers:
            table[transfer.layer, transfer.slot] = transfer.expert
        self._slots.publish()
        check_coverage(view, staged.placement)
        self._published(staged.placement, route(staged.placement, staged.record))
        self._base = staged.record
        self.standing = Standing(view, self.standing.next_name, staged.record, staged.placement)
        self._say_margin(view, staged.placement)

    def _bring_in(self, view: View, steps: RepairPlan) -> None:
        """Carries out this rank's steps. It gives up no slot before it can verify what is to fill it."""
        deadline = time.monotonic() + self._policy.repair_within
        self._late = tuple(wait(self._late, timeout=self._policy.repair_within).not_done)
        if self._late:
            raise RepairFailed(
                f"{len(self._late)} sources still read into slots of this rank for an earlier repair",
                steps.transfers,
                self._late,
            )
        checksum_sources.learn_for_transfers(self._checksums, steps.transfers, self._memory, self._sources)
        for transfer in steps.transfers:
            self._slots.table[transfer.layer, transfer.slot] = EMPTY
        self._slots.publish()
        peers = MappedPeers(self._directory, view, self._memory.layout.region_bytes, self._device)
        try:
            report = execute_repair(
                steps,
                self._rank,
                self._memory,
                lambda origin: self._sources.reader_of(origin, self._memory, peers),
                self._checksums,
                timeout=max(0.0, deadline - time.monotonic()),
            )
        except RepairFailed as error:
            self._late = error.still_reading
            raise
        finally:
            peers.close()
        for transfer in steps.transfers:
            self._slots.table[transfer.layer, transfer.slot] = transfer.expert
        self.brought_in += report.bytes_by_tier
        moved = ", ".join(f"{n >> 10} KiB from {tier.name.lower()}" for tier, n in report.bytes_by_tier.items())
        logger.info("epoch %d: %d experts brought in (%s)", view.epoch, len(steps.transfers), moved)
        for setback in report.setbacks[:_MOST_SETBACKS]:
            logger.info("epoch %d: %s; the next source was tried", view.epoch, setback)

    def close(self) -> None:
        if self._offer is not None:
            self._offer.close()
        self._server.close()
        self.registry.close()

    def _say_what_is_masked(self, view: View, placement: Placement) -> None:
        if placement.degraded:
            masked = placement.masked
            logger.warning(
                "epoch %d: %d of %d experts are masked, for ranks %s have too few slots: answers differ from those of the "
                "whole model until a rank comes back",
                view.epoch,
                int(masked.sum()),
                masked.size,
                list(view.active),
            )
        elif self._degraded:
            logger.warning(
                "epoch %d: no expert is masked any more; answers are those of the whole model again", view.epoch
            )
        self._degraded = placement.degraded

    def _say_margin(self, view: View, placement: Placement) -> None:
        """For ``eep status``. All ranks know the same, so the first one speaks."""
        if self._rank == min(view.active):
            found = find_margin(placement, view.active, [0] * placement.max_ranks)
            publish_margin(
                self.registry, MarginRecord(view.epoch, found.any_ranks, found.ranks, found.repairable_ranks)
            )

    def _no_load(self) -> FloatArray:
        return np.ones((self._first.layers, self._first.experts))
