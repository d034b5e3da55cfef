"""This rank's session: it joins the others, repairs what they lose, keeps every expert covered, and counts what it did.

It is made when the weights are loaded. The rank joins at the first boundary of a step, when everything else that SGLang
prepares is done too.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from eep.control.launch.processes import INCARNATION
from eep.control.private_directory import CONTROL_DIRECTORY, member_rendezvous
from eep.experts.balancing.balance_turns import BalanceTurns
from eep.experts.balancing.balancer import Balancer
from eep.experts.balancing.leader import BalancePolicy
from eep.experts.balancing.staging import make_room
from eep.experts.catch_up_turns import CatchUpTurns
from eep.experts.checkpoint.conversion import open_checkpoint
from eep.experts.coverage import Coverage
from eep.experts.coverage_policy import CoveragePolicy
from eep.experts.layout import checksum
from eep.experts.loaded_experts import LoadedExperts
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import WhenShort
from eep.experts.repair.reader import Reader, SourceLost, Want
from eep.experts.repair.repair_plan import Tier
from eep.experts.repair.repair_sources import RepairSources
from eep.experts.repair.throttled_reader import throttled
from eep.experts.room_record import publish_room
from eep.experts.slot_room import SlotRoom
from eep.observe.metrics import RankMetrics
from eep.recovery.session import Session
from eep.recovery.step_overhead import StepOverhead
from eep.recovery.words import BytesExchange, WordExchange
from eep.view import View
from sglang_patches import expert_backup, garbage_collector
from sglang_patches.rank import host_access, kernel_compiler, next_life, own_device, process_groups
from sglang_patches.rank.expert_weights import ExpertWeights
from sglang_patches.rank.kv import cache_room
from sglang_patches.rank.model_facts import ModelFacts, get_facts
from sglang_patches.rank.rank_data_plane import RankDataPlane, get_plane

logger = logging.getLogger(__name__)


class RankSession:
    """``checkpoint``: a source for repair, if it has the experts as they are served. ``directory``: the server's own."""

    def __init__(
        self,
        facts: ModelFacts,
        plane: RankDataPlane,
        weights: ExpertWeights,
        checkpoint: Reader | None,
        directory: Path,
    ) -> None:
        self._facts, self._plane, self._weights = facts, plane, weights
        self._checkpoint, self._directory = checkpoint, directory
        asked = facts.options.balance
        # Taken before SGLang measures the memory that is left.
        self._aside = None if asked is None else make_room(weights.memory, asked.most)
        self.rank = facts.rank
        self.turns: list[BalanceTurns | CatchUpTurns] = []
        """Where ranks agree, between steps, on what they change while they serve."""
        self.balancer: Balancer | None = None
        """None where experts do not move while the rank serves, and until it has asked to be let in."""
        self.overhead: StepOverhead | None = None
        """None until this rank has asked to be let in."""
        self.joined: Session | None = None
        """None until this rank has asked to be let in."""

    def renew(self, weights: ExpertWeights) -> None:
        """These are the weights with which this rank joins."""
        self._weights = weights

    def join(self) -> Session:
        """The first call says that this rank is ready. Every call returns the same session. A spare first waits here until
        it is needed."""
        if self.joined is None:
            next_life.await_beginning()
            own_device.tell_device(self._directory, self.rank, self._facts.device)
            # As soon as a view has this rank in it the others look for what it holds, and look again only in the next view.
            self.coverage  # noqa: B018
            garbage_collector.freeze_this_process(collect=True)
            world = process_groups.world()
            self.joined = Session(world, self._plane.buffers, self._repair, self._plane.run_empty)
            self._plane.advance = self.joined.member.advance
            self._plane.run = self.joined.member.run
            self._plane.may_take_long = self.joined.member.may_take_long
            if self._facts.device != "cpu":
                self.joined.member.may_wait_unseen()
                kernel_compiler.tell(self.joined.member.advance)
            self.overhead = self._measured(self.joined)
            if (asked := self._facts.options.balance) is not None:
                policy = BalancePolicy(asked.every, asked.least, asked.layers)
                life = (self.rank, int(os.environ[INCARNATION]))
                self.balancer = Balancer(life, self.coverage, self._plane.count_uses, policy)
                self.turns.append(BalanceTurns(self.joined, WordExchange(world, "eep/balance"), self.balancer))
                self.balancer.start()
            if self._facts.options.mask_after_s is not None:
                told = BytesExchange(world, "eep/arrived", self.coverage.packed_bytes, "asking what has arrived")
                self.turns.append(CatchUpTurns(self.joined, told, self.coverage))
        return self.joined

    @cached_property
    def coverage(self) -> Coverage:
        """What keeps every expert on an active rank."""
        facts, plane, weights = self._facts, self._plane, self._weights
        when_short: WhenShort = "mask" if facts.options.masks else "refuse"
        backup = expert_backup.connect(
            self._directory,
            facts.options.backup,
            self.rank,
            weights.memory,
            weights.shared,
            facts.first_placement.experts,
        )
        found = Coverage(
            LoadedExperts(
                self.rank,
                int(os.environ[INCARNATION]),
                facts.first_placement,
                weights.memory,
                weights.shared,
                weights.checksums,
                plane.device,
                weights.held,
                None if weights.kept is None else weights.kept.index,
                self._aside,
            ),
            member_rendezvous() / "experts",
            plane.location.publish,
            CoveragePolicy(
                facts.options.repair_timeout_s,
                when_short,
                (lambda: plane.count_uses().astype(np.float64)) if plane.masks else None,
                2 if facts.options.shadows else 1,
                facts.options.mask_after_s,
                facts.moe_shape.open_slots,
                self._room(),
            ),
            RepairSources(self._checkpoint, backup.client),
            backup.offer,
            host_access.instance_hosts(facts.options),
        )
        cache_room.report_to(partial(publish_room, found.registry, self.rank, int(os.environ[INCARNATION])))
        return found

    def _room(self) -> SlotRoom | None:
        """Where this rank has memory for more slots than usual. None if it never gets any."""
        weights, usual = self._weights, self._facts.moe_shape.open_slots
        if not usual:
            return None
        left = 0 if weights.held is None else int(np.argwhere(weights.held != EMPTY)[:, 1].max(initial=-1)) + 1
        return SlotRoom(weights.memory.layout, weights.shared, usual, cache_room.take, left)

    def _repair(self, view: View) -> int | None:
        before = self.coverage.brought_in.copy()
        digest = self.coverage.repair(view)
        brought_in = {tier.name.lower(): self.coverage.brought_in[tier] for tier in Tier}
        self._metrics.tell(self.join().repeated, brought_in)
        now = {name: count - before[Tier[name.upper()]] for name, count in brought_in.items()}
        self.join().member.note_repair(sum(now.values()) // self._weights.memory.layout.expert_bytes, now)
        return digest

    def _measured(self, session: Session) -> StepOverhead:
        # Each layer exchanges tokens twice. On a GPU the steps that count are graphs, of which the host sees only the ends.
        exchanges = 2 * len(self._facts.layer_ids) if self._facts.device == "cpu" else 0
        said = (session.member.run, session.member.advance)
        return StepOverhead(session.bookkeeping, said, exchanges, self._metrics.tell_overhead)

    @cached_property
    def _metrics(self) -> RankMetrics:
        return RankMetrics(self.rank)


_session: RankSession | None = None


def start_session(weights: ExpertWeights, checkpoint: Path) -> None:
    """Make the session of this process, when its weights are loaded. SystemExit if ``--eep-backup`` cannot have its way."""
    global _session
    facts, directory = get_facts(), Path(os.environ[CONTROL_DIRECTORY])
    reader = _open_checkpoint(checkpoint, weights, facts.layer_ids)
    if facts.options.backup == "checkpoint":
        if reader is None:
            raise SystemExit(
                f"--eep-backup checkpoint: {checkpoint} does not have the experts as they are served (the log says why); "
                "use --eep-backup live, which takes them from memory"
            )
        expert_backup.describe_checkpoint(directory, checkpoint, facts.layer_ids, weights.memory.layout)
    _session = RankSession(facts, get_plane(), weights, reader, directory)


def get_session() -> RankSession:
    """The session of this process, once :func:`start_session` has made it."""
    if _session is None:
        raise RuntimeError("this rank has no session yet: it is made when the weights are loaded")
    return _session


def _open_checkpoint(path: Path, weights: ExpertWeights, layers: list[int]) -> Reader | None:
    """The checkpoint as a source for repair. None if it gives other bytes than were loaded from it: SGLang may have quantised
    or reordered them."""
    layout = weights.memory.layout
    try:
        source = open_checkpoint(path, None, layers, [spec.dtype for spec in layout.tensors])
        if [spec.shape for spec in source.layout.tensors] != [spec.shape for spec in layout.tensors]:
            raise ValueError("its experts have other shapes than those that are served")
        layer, expert = (int(each) for each in np.argwhere(weights.checksums.known)[0])
        aside = [torch.empty_like(piece, device="cpu") for piece in weights.memory.pieces(layer, 0)]
        source.reader.read([Want(layer, expert, 0, aside)])
        if not weights.checksums.matches(layer, expert, checksum(aside)):
            raise ValueError("its experts are not those that are served: SGLang converted them when it loaded them")
        return throttled(source.reader)
    except (OSError, ValueError, SourceLost) as error:
        logger.warning("lost experts cannot be read from the checkpoint %s: %s", path, error)
        return None
