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
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from eep import faults
from eep.access import make_private
from eep.data_plane.memory import kind_of
from eep.errors import EepError
from eep.experts.agreed_load import AgreedLoad
from eep.experts.arrivals import Arrivals, packed_bytes, part_of
from eep.experts.backup.live_offer import LiveOffer
from eep.experts.balancing.placement_log import BaseRecord, LogName, PlacementLog
from eep.experts.balancing.staging import Staged, StagingArea
from eep.experts.coverage_policy import CoveragePolicy
from eep.experts.elsewhere_record import say_elsewhere
from eep.experts.held_slots import HeldSlots, RegionPlace
from eep.experts.instance_hosts import LEAST_COPIES, InstanceHosts
from eep.experts.loaded_experts import LoadedExperts
from eep.experts.margin_record import say_margin
from eep.experts.mask_notice import MaskNotice
from eep.experts.model_comparison import ModelComparison
from eep.experts.partial_repair import PartialRepair
from eep.experts.placement.open_slots import used_slots
from eep.experts.placement.packing import EMPTY, FloatArray
from eep.experts.placement.slot_plan import CoverageError, Placement
from eep.experts.registry.deferring_registry import DeferringRegistry
from eep.experts.registry.directory_registry import DirectoryRegistry, Registry
from eep.experts.registry.published_records import ModelShape
from eep.experts.repair.executor import RepairFailed
from eep.experts.repair.far_peers import hide_region, show_region
from eep.experts.repair.peer_memory import copy_all, serve_region
from eep.experts.repair.repair_plan import Tier
from eep.experts.repair.repair_sources import RepairSources
from eep.experts.repair.view_peers import PeerFinder
from eep.experts.slot_filler import SlotFiller
from eep.experts.standing import Standing, place, route
from eep.experts.view_record import HELD_DIRECTORY
from eep.recovery.contract import check_coverage
from eep.view import View

logger = logging.getLogger(__name__)
_HEARD_WITHIN_S = 5.0
"""How long the store may take to pass on what a rank holds."""
LACKING = 0
"""In place of a digest; see :data:`eep.recovery.session.Repair`."""


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
        hosts: InstanceHosts | None = None,
    ) -> None:
        """``directory`` is private, and shared by the ranks of this host. ``offer`` is told what the slots hold. ``hosts``:
        None if all ranks are on one."""
        if hosts is not None and loaded.aside is not None:
            raise EepError("experts move while ranks serve only where all ranks are on one host")
        make_private(directory)
        rank, first = loaded.rank, loaded.placement
        self._rank = rank
        self._first, self._memory = first, loaded.memory
        self._published, self._policy, self._offer = published, policy, offer
        sources = sources or RepairSources()
        self._hosts = hosts
        least = policy.least_copies if hosts is None else max(policy.least_copies, LEAST_COPIES)
        topology = () if hosts is None else hosts.topology
        self._base = BaseRecord.of(first, self._no_load(), 0, least, policy.open_slots, topology)
        self.log = self.stage = None
        if loaded.aside is not None:
            self.log = PlacementLog(directory / "placements")
            self.log.enter(0, self._base)  # its room on the disk is taken now
        self.standing: Standing | None = None
        """None while this rank does not serve."""
        self._closed_for: Standing | None = None
        """For what unused slots were closed last."""
        size = first.slots_per_rank
        first_held = first.physical_to_logical[:, rank * size : (rank + 1) * size]
        self._of_host = DirectoryRegistry(directory / HELD_DIRECTORY)
        self._of_host.sweep()  # its keys name an incarnation, so none is ever used again
        self.registry: Registry = self._of_host
        """In which ranks tell each other what they hold, and what they have counted."""
        self._far: DeferringRegistry | None = None
        self._place: RegionPlace | None = None
        if hosts is not None:
            self.registry = self._far = DeferringRegistry(self._of_host, hosts.registry)
            self._place = show_region(hosts, rank, loaded.shared)
        self._slots = HeldSlots(
            self.registry,
            (rank, loaded.incarnation),
            first_held if loaded.held is None else loaded.held,
            ModelShape.of(loaded.memory.layout, first.experts),
            loaded.checksums,
            loaded.index,
            offer,
            self._place,
            0.0 if hosts is None else _HEARD_WITHIN_S,
        )
        self._comparison: ModelComparison | None = None
        if hosts is not None:
            self._comparison = ModelComparison(rank, hosts, self._slots, sources.checkpoint is not None)
        kind = kind_of(loaded.shared)
        finder = PeerFinder(directory, loaded.memory.layout, kind, self._slots, hosts, policy.open_slots)
        if loaded.aside is not None:
            self.stage = StagingArea(rank, loaded.memory, loaded.aside, loaded.checksums, sources, finder)
        self._load = AgreedLoad(self.registry, rank, loaded.incarnation, policy.counted or self._no_load)
        if policy.when_short == "mask":
            self._load.take_room()
        self._notice = MaskNotice()
        self.packed_bytes = packed_bytes(first.layers, size)
        self._after: Placement | None = None
        """What is served when all of it has arrived."""
        self._server = serve_region(directory, rank, loaded.incarnation, loaded.shared)
        self._filler = SlotFiller(
            rank, first, loaded.memory, loaded.checksums, self._slots, sources, finder, self._base.topology
        )
        self.partly: PartialRepair | None = None
        """None where a view waits for all of its experts."""
        if policy.mask_after is not None:
            arrivals = Arrivals(self.registry, (rank, loaded.incarnation), self.packed_bytes)
            asked = policy.counted or self._no_load
            self.partly = PartialRepair(self._filler, arrivals, policy.mask_after, policy.repair_within, asked)
        self._slots.publish()
        if self._far is not None and not self._far.flush(_HEARD_WITHIN_S):
            logger.warning("rank %d begins though the store does not know yet what it holds", rank)

    @property
    def brought_in(self) -> Counter[Tier]:
        """Bytes of experts that came from elsewhere, so far."""
        return self._filler.brought_in

    @property
    def is_behind(self) -> bool:
        """Whether some rank of the view has yet to bring something in. All ranks of a view say the same."""
        return self.standing is not None and self._after is not None and self.standing.placement is not self._after

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
        peers = self._filler.peers(view)
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
        return place(view, self._base.renewed(self._base.placement, load, self._base.doses), "mask")

    def repair(self, view: View) -> int | None:
        """Makes this rank's part of the placement of ``view``. Returns the placement's digest, or None if there is none.

        ``LACKING`` if no source has some experts of this rank. The rank stays: the next joiner brings what it loads when it
        starts, and a rank that ended instead would take with it what its peers may need.
        """
        self.standing = self._after = None
        if self.partly is not None:
            self.partly.stop()
        after = self.placement_of(view)
        if after is None:
            return None
        if not self._open_slots(view, after):
            return LACKING
        steps = self._filler.plan(view, after)
        if self._comparison is not None:
            self._comparison.check(view)
        shown: Placement | None = after
        if self.partly is not None and not (steps.unreachable and self._is_first(after)):
            shown = self.partly.bring_in(view, after, steps)
        elif steps.transfers:
            try:
                self._filler.fill(view, steps, self._policy.repair_within)
            except RepairFailed as error:
                if self._is_first(after):
                    self._slots.forget()
                    raise  # this rank lacks what it was started with, and its next incarnation loads that
                logger.warning("epoch %d: no step runs until another rank joins: %s", view.epoch, error)
                return LACKING
        if shown is None:
            return None
        self._filler.publish()
        faults.at("repair.done")
        self._after = after
        self._serve(view, LogName(view.epoch, 0), shown)
        return int(shown.digest[:16], 16)

    def _open_slots(self, view: View, after: Placement) -> bool:
        """Whether there is memory for all slots of this rank in ``after``."""
        if self._policy.room is None:
            return True
        try:
            self._policy.room.open(used_slots(after))
        except (EepError, OSError) as error:
            logger.warning("epoch %d: no step runs until another rank joins: %s", view.epoch, error)
            return False
        faults.at("room.made")
        return True

    def close_slots(self) -> None:
        """Give back the memory of slots that are not used any more. Call it between two steps, when all ranks have settled in
        the view: until then they may need what is there."""
        room, standing = self._policy.room, self.standing
        if room is None or standing is None or standing is self._closed_for:
            return
        self._closed_for = standing
        kept = max(used_slots(standing.placement), room.usual)
        if room.slots > kept:
            self._filler.clear_from(kept)
            room.close(kept)
            faults.at("room.returned")

    def _is_first(self, placement: Placement) -> bool:
        return np.array_equal(placement.physical_to_logical, self._first.physical_to_logical)

    def arrived(self) -> bytes:
        """What this rank holds by now of the placement of the view."""
        assert self.partly is not None
        return self.partly.arrived()

    def serve_arrived(self, heard: Mapping[int, bytes]) -> None:
        """Between two steps: serve what all ranks have said that they hold. All of them do so before the same step."""
        if self.standing is None or self._after is None:
            raise EepError("no placement is in force; nothing was changed")
        shown = part_of(self._after, heard)
        if shown.digest != self.standing.placement.digest:
            faults.at("behind.agreed")
            self._serve(self.standing.view, self.standing.name, shown)
            faults.at("behind.served")

    def _serve(self, view: View, name: LogName, shown: Placement) -> None:
        check_coverage(view, shown)
        self._published(shown, route(shown, self._base))
        self.standing = Standing(view, name, self._base, shown)
        if self._comparison is not None:
            self._comparison.has_served = True
        self._notice.say(view, shown, is_behind=self.is_behind)
        say_margin(self._of_host, self._rank, self.standing)
        say_elsewhere(self._of_host, self._rank, self.standing)

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
        self._base, self._after = staged.record, staged.placement
        self._serve(view, self.standing.next_name, staged.placement)

    def close(self) -> None:
        if self.partly is not None:
            self.partly.stop()
        if self._offer is not None:
            self._offer.close()
        self._server.close()
        if self._far is not None:
            self._far.close()
        if self._hosts is not None and self._place is not None:
            hide_region(self._hosts, self._place)
        self._of_host.close()

    def _no_load(self) -> FloatArray:
        return np.ones((self._first.layers, self._first.experts))
