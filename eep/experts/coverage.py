"""Keeping every expert on an active rank, view after view.

The placement of a view is a pure function of who is in it: what the ranks of the launch hold when nobody is missing, and
from there the fewest moves. So all ranks make the same one without talking, one that joins included, and when all are back
the first placement is back too.

What a rank lacks it brings in by itself: from another slot of its own, from the memory of another rank, from the checkpoint.
Ranks say in a registry what they hold. That may be a moment old, or a slot may be overwritten while it is read; every
expert is verified by its checksum, and what does not verify comes from the next source.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory, checksum
from eep.experts.packing import EMPTY, IntArray
from eep.experts.placement import CoverageError, Placement, WhenShort, plan
from eep.experts.records import RankRecord, Shape, decode_all, encode
from eep.experts.registry import DirectoryRegistry
from eep.experts.repair import LocalReader, PeerReader, Reader, SourceLost, Want, repair
from eep.experts.repair_plan import Origin, Tier, plan_repair
from eep.experts.transport import MappedPeers, RegionServer
from eep.memory import Memory
from eep.validity import check_coverage
from eep.view import View

logger = logging.getLogger(__name__)
_HELD = "held/"


class Coverage:
    """The experts of one rank. ``published`` is called with each new placement, when all of it is there."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        first: Placement,
        memory: ExpertMemory,
        shared: Memory,
        checksums: Checksums,
        directory: Path,
        published: Callable[[Placement], None],
        *,
        checkpoint: Reader | None = None,
        when_short: WhenShort = "refuse",
        device: str = "cpu",
    ) -> None:
        """``memory`` holds what ``first`` says; ``directory`` is private, and shared by the ranks of this host."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._rank, self._name = rank, f"{_HELD}r{rank}.i{incarnation}"
        self._first, self._memory, self._checksums = first, memory, checksums
        self._directory, self._published, self._device = directory, published, device
        self._checkpoint, self._when_short = checkpoint, when_short
        size = first.slots_per_rank
        self._held: IntArray = first.physical_to_logical[:, rank * size : (rank + 1) * size].copy()
        self._registry = DirectoryRegistry(directory / "held")
        self._server = RegionServer(directory, rank, incarnation, shared)
        self.brought_in: Counter[Tier] = Counter()
        """Bytes of experts that came from elsewhere, so far."""
        self._say_what_is_held()

    def placement_of(self, view: View) -> Placement:
        """Where experts are to be in a view. Raises :class:`CoverageError` when its ranks cannot hold them all."""
        topology = [0] * self._first.max_ranks
        load = np.ones((self._first.layers, self._first.experts))
        size = self._first.slots_per_rank
        return plan(load, self._first, view.active, size, topology, when_short=self._when_short)

    def repair(self, view: View) -> int | None:
        """Makes this rank's part of the placement of ``view``; its digest, or None if there is none."""
        try:
            after = self.placement_of(view)
        except CoverageError as error:
            logger.warning("epoch %d: %s; nothing runs until a rank has come back", view.epoch, error)
            return None
        before = self._what_is_held(view)
        steps = plan_repair(
            before,
            after,
            view.active,
            [0] * after.max_ranks,
            self._memory.layout.expert_bytes,
            disk=self._checkpoint is not None,
        ).of(self._rank)
        if steps.transfers:
            for transfer in steps.transfers:
                self._held[transfer.layer, transfer.slot] = EMPTY
                self._learn_checksum(transfer.layer, transfer.expert)
            self._say_what_is_held()
            peers = MappedPeers(self._directory, view, self._memory.layout.region_bytes, self._device)
            try:
                # Nobody waits for anybody: a source that was overwritten meanwhile does not verify, and another one is taken.
                report = repair(
                    steps, self._rank, self._memory, lambda o: self._reader(o, peers), self._checksums, barrier=_nothing
                )
            finally:
                peers.close()
            for transfer in steps.transfers:
                self._held[transfer.layer, transfer.slot] = transfer.expert
            self.brought_in += report.bytes_by_tier
            moved = ", ".join(f"{n >> 10} KiB from {tier.name.lower()}" for tier, n in report.bytes_by_tier.items())
            logger.info("epoch %d: %d experts brought in (%s)", view.epoch, len(steps.transfers), moved)
        self._say_what_is_held()
        check_coverage(view, after)
        self._published(after)
        return int(after.digest[:16], 16)

    def close(self) -> None:
        self._server.close()
        self._registry.close()

    def _reader(self, origin: Origin, peers: MappedPeers) -> Reader:
        match origin.tier:
            case Tier.LOCAL:
                return LocalReader(self._memory)
            case Tier.PEER:
                return PeerReader(self._memory.layout, peers, origin.rank)
            case Tier.DISK if self._checkpoint is not None:
                return self._checkpoint
        raise SourceLost(f"{origin} is not a source of this rank")

    def _what_is_held(self, view: View) -> Placement:
        """What lies where, as far as the ranks of the view have said."""
        table = np.full_like(self._first.physical_to_logical, EMPTY)
        size, experts = self._first.slots_per_rank, self._first.experts
        records = decode_all(self._registry.scan(_HELD), _HELD, RankRecord)
        for rank in view.active:
            record = records.get(f"r{rank}.i{view.incarnations[rank]}")
            if rank == self._rank:
                numbers = self._held
            elif record is not None and record.slots == size and record.shape == self._shape():
                stored = record.slot_numbers().reshape(-1, size)
                numbers = np.where(stored == EMPTY, EMPTY, stored % experts)
                self._learn_from(record, stored)
            else:
                continue
            table[:, rank * size : (rank + 1) * size] = numbers
        return Placement(table, experts, size)

    def _learn_from(self, record: RankRecord, stored: IntArray) -> None:
        layers, experts = self._checksums.values.shape
        sums = record.slot_checksums().reshape(stored.shape)
        for layer, slot in np.argwhere(stored != EMPTY).tolist():
            expert = int(stored[layer, slot]) - layer * experts
            if 0 <= layer < layers and 0 <= expert < experts and not self._checksums.known[layer, expert]:
                self._checksums.values[layer, expert] = sums[layer, slot]
                self._checksums.known[layer, expert] = True

    def _learn_checksum(self, layer: int, expert: int) -> None:
        """Of an expert that nobody here has had yet: the checkpoint is what all were loaded from."""
        if self._checksums.known[layer, expert] or self._checkpoint is None:
            return
        aside = [torch.empty_like(piece) for piece in self._memory.pieces(layer, 0)]
        self._checkpoint.read([Want(layer, expert, 0, aside)])
        self._checksums.values[layer, expert] = checksum(aside)
        self._checksums.known[layer, expert] = True

    def _say_what_is_held(self) -> None:
        experts = self._first.experts
        layers = np.arange(self._held.shape[0])[:, None]
        numbers = np.where(self._held == EMPTY, EMPTY, layers * experts + self._held)
        sums = np.take_along_axis(self._checksums.values, np.maximum(self._held, 0), axis=1)
        record = RankRecord(
            host=0,
            session="",
            address=0,
            slots=self._held.shape[1],
            shape=self._shape(),
            numbers=numbers.astype("<i8").tobytes(),
            checksums=sums.astype("<u8").tobytes(),
        )
        self._registry.publish(self._name, encode(record))

    def _shape(self) -> Shape:
        return Shape.of(self._memory.layout, self._first.experts)


def _nothing() -> None:
    pass
