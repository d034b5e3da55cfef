"""A rank whose experts are kept covered, view after view."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from eep.data_plane.memory import MemoryKind
from eep.data_plane.memory.parted import PartedKind
from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.backup_client import BackupClient
from eep.experts.balancing.staging import make_room
from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.checksums import Checksums
from eep.experts.coverage import Coverage
from eep.experts.coverage_policy import CoveragePolicy
from eep.experts.instance_hosts import LEAST_COPIES, InstanceHosts
from eep.experts.layout import ExpertMemory
from eep.experts.loaded_experts import LoadedExperts
from eep.experts.placement.open_slots import widen
from eep.experts.placement.packing import EMPTY, FloatArray
from eep.experts.placement.slot_plan import Placement, WhenShort, plan_placement
from eep.experts.repair.reader import Want
from eep.experts.repair.repair_sources import RepairSources
from eep.experts.slot_index import SlotIndex, index_bytes
from eep.experts.slot_room import SlotRoom, loose_ranges
from eep.view import View
from tests.experts import model

RANKS = 4
PATIENCE_S = 60.0


class Rank:
    def __init__(
        self,
        directory: Path,
        rank: int,
        slots: int,
        disk: Path | None,
        incarnation: int = 0,
        when_short: WhenShort = "refuse",
        counted: FloatArray | None = None,
        backup: BackupClient | None = None,
        repair_within: float = 120.0,
        last: Rank | None = None,
        staged: int = 0,
        least_copies: int = 1,
        mask_after: float | None = None,
        most: int | None = None,
        take: Callable[[int], None] = lambda size: None,
        hosts: InstanceHosts | None = None,
        empty: bool = False,
        parted: bool = False,
        other_model: bool = False,
    ) -> None:
        """``last``: an earlier life, whose experts this one takes over. ``staged``: how many experts move here at once.
        ``most``: for how many slots there are addresses; ``take`` is told how much memory those have beyond ``slots``.
        ``hosts``: where there are several. ``empty``: this life has loaded nothing; ``other_model``: it has loaded experts
        with other bytes. ``parted``: its memory is in parts."""
        self.rank = rank
        topology, least = ([0] * RANKS, 1) if hosts is None else (hosts.topology, LEAST_COPIES)
        load = np.ones((model.LAYERS, model.EXPERTS))
        first = plan_placement(load, None, range(RANKS), slots, topology, least_copies=least)
        usual, slots = slots if most else 0, most or slots
        first = widen(first, slots)
        layout = model.layout(slots)
        self.shown: Placement | None = None
        self.routed: Placement | None = None
        self.first, self.held = first, None
        if last is None:
            kind: MemoryKind = PartedKind(tuple(loose_ranges(layout, usual)), False) if parted else SharedMemory
            self.shared = kind.create("experts", layout.region_bytes)
            self.memory = ExpertMemory(layout, self.shared.bytes_at(0, layout.region_bytes))
            if empty:
                self.sums = Checksums.none(model.LAYERS, model.EXPERTS)
                self.held = np.full((model.LAYERS, slots), EMPTY, dtype=np.int64)
            else:
                model.load(self.memory, first, rank)
                if other_model:
                    self.shared.bytes_at(0, layout.region_bytes).bitwise_not_()
                self.sums = Checksums.of_rank(self.memory, first, rank)
            noted = np.zeros(index_bytes(model.LAYERS, slots), dtype=np.uint8)
            self.index = SlotIndex(noted, model.LAYERS, slots)
        else:
            self.shared, self.memory, self.index = last.shared, last.memory, last.index
            self.held, self.sums = self.index.verify(self.memory, model.EXPERTS)
        left = 0 if self.held is None else int(np.argwhere(self.held != EMPTY)[:, 1].max(initial=-1)) + 1
        self.room = SlotRoom(layout, self.shared, usual, take, left) if usual else None
        self.coverage = Coverage(
            LoadedExperts(
                rank,
                incarnation,
                first,
                self.memory,
                self.shared,
                self.sums,
                held=self.held,
                index=self.index,
                aside=make_room(self.memory, staged) if staged else None,
            ),
            directory,
            self._show,
            CoveragePolicy(
                *(repair_within, when_short, None if counted is None else lambda: counted, least_copies, mask_after),
                open_slots=usual,
                room=self.room,
            ),
            RepairSources(CheckpointReader(disk) if disk else None, backup),
            hosts=hosts,
        )

    def _show(self, placement: Placement, routed: Placement) -> None:
        self.shown, self.routed = placement, routed

    def check(self) -> None:
        assert self.shown is not None
        assert not model.wrong_slots(self.memory, self.shown, self.rank)

    def close(self) -> None:
        self.coverage.close()
        self.shared.close()


@contextlib.contextmanager
def ranks(
    directory: Path,
    slots: int,
    disk: Path | None,
    when_short: WhenShort = "refuse",
    backup: BackupClient | None = None,
    repair_within: float = 120.0,
    mask_after: float | None = None,
) -> Iterator[dict[int, Rank]]:
    group = {
        rank: Rank(
            *(directory / "e", rank, slots, disk, 0, when_short, counts_of(rank), backup, repair_within),
            mask_after=mask_after,
        )
        for rank in range(RANKS)
    }
    try:
        yield group
    finally:
        for rank in group.values():
            rank.close()


class HeldReads:
    """Reads of the checkpoint that last until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = 0
        self._go, self._some = threading.Event(), threading.Semaphore(0)
        self._changes = threading.Condition()
        read = CheckpointReader.read

        def held(reader: CheckpointReader, wants: Sequence[Want]) -> None:
            self._count(1)
            try:
                end = time.monotonic() + PATIENCE_S
                while not self._go.is_set() and not self._some.acquire(timeout=0.01):
                    assert time.monotonic() < end
                read(reader, wants)
            finally:
                self._count(-1)

        monkeypatch.setattr(CheckpointReader, "read", held)

    def wait_until_begun(self) -> None:
        with self._changes:
            assert self._changes.wait_for(lambda: self.under_way > 0, PATIENCE_S), "no read has begun"

    def let_some_go(self, reads: int) -> None:
        """As many, of those that wait now or come later."""
        for _ in range(reads):
            self._some.release()

    def let_go(self) -> None:
        """Returns once no read is under way any more."""
        self._go.set()
        with self._changes:
            assert self._changes.wait_for(lambda: not self.under_way, PATIENCE_S)

    def _count(self, change: int) -> None:
        with self._changes:
            self.under_way += change
            self._changes.notify_all()


def counts_of(rank: int) -> FloatArray:
    """What a rank has counted: the same order everywhere, the last experts the most asked for, other numbers."""
    return np.tile(np.arange(model.EXPERTS) * 10.0 + rank, (model.LAYERS, 1))


def enter(group: dict[int, Rank], view: View, masked: bool = False) -> None:
    with ThreadPoolExecutor() as together:
        answers = {rank: together.submit(group[rank].coverage.repair, view) for rank in view.active}
    digests = {rank: answer.result() for rank, answer in answers.items()}
    assert len(set(digests.values())) == 1
    assert None not in digests.values()
    for rank in view.active:
        group[rank].check()
        shown = group[rank].shown
        assert shown is not None
        assert shown.degraded == masked
        assert (shown.on(view.active).replica_counts > 0).all() != masked
