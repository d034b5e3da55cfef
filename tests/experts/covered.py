"""A rank whose experts are kept covered, view after view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.backup_client import BackupClient
from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.checksums import Checksums
from eep.experts.coverage import Coverage
from eep.experts.layout import ExpertMemory
from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import Placement, WhenShort, plan
from eep.view import View
from tests.experts import model

RANKS = 4


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
    ) -> None:
        self.rank = rank
        first = plan(np.ones((model.LAYERS, model.EXPERTS)), None, range(RANKS), slots, [0] * RANKS)
        layout = model.layout(slots)
        self.shared = SharedMemory.create("experts", layout.region_bytes)
        self.memory = ExpertMemory(layout, self.shared.bytes_at(0, layout.region_bytes))
        model.load(self.memory, first, rank)
        self.shown: Placement | None = None
        self.first, self.sums = first, Checksums.of_rank(self.memory, first, rank)
        self.coverage = Coverage(
            rank,
            incarnation,
            first,
            self.memory,
            self.shared,
            self.sums,
            directory,
            self._show,
            repair_within=repair_within,
            checkpoint=CheckpointReader(disk) if disk else None,
            backup=backup,
            when_short=when_short,
            counted=None if counted is None else lambda: counted,
        )

    def _show(self, placement: Placement) -> None:
        self.shown = placement

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
) -> Iterator[dict[int, Rank]]:
    group = {
        rank: Rank(directory / "e", rank, slots, disk, 0, when_short, counts_of(rank), backup, repair_within)
        for rank in range(RANKS)
    }
    try:
        yield group
    finally:
        for rank in group.values():
            rank.close()


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
