"""A rank whose experts are kept covered, view after view."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eep.experts.backup_client import BackupClient
from eep.experts.checkpoint import CheckpointReader
from eep.experts.checksums import Checksums
from eep.experts.coverage import Coverage
from eep.experts.layout import ExpertMemory
from eep.experts.packing import FloatArray
from eep.experts.placement import Placement, WhenShort, plan
from eep.memory.shm import SharedMemory
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
