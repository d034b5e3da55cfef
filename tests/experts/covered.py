"""A rank whose experts are kept covered, view after view."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eep.experts.checkpoint import CheckpointReader
from eep.experts.checksums import Checksums
from eep.experts.coverage import Coverage
from eep.experts.layout import ExpertMemory
from eep.experts.placement import Placement, plan
from eep.memory.shm import SharedMemory
from tests.experts import model

RANKS = 4


class Rank:
    def __init__(self, directory: Path, rank: int, slots: int, disk: Path | None, incarnation: int = 0) -> None:
        self.rank = rank
        first = plan(np.ones((model.LAYERS, model.EXPERTS)), None, range(RANKS), slots, [0] * RANKS)
        layout = model.layout(slots)
        self.shared = SharedMemory.create("experts", layout.region_bytes)
        self.memory = ExpertMemory(layout, self.shared.bytes_at(0, layout.region_bytes))
        model.load(self.memory, first, rank)
        self.shown: Placement | None = None
        self.coverage = Coverage(
            rank,
            incarnation,
            first,
            self.memory,
            self.shared,
            Checksums.of_rank(self.memory, first, rank),
            directory,
            self._show,
            checkpoint=CheckpointReader(disk) if disk else None,
        )

    def _show(self, placement: Placement) -> None:
        self.shown = placement

    def check(self) -> None:
        assert self.shown is not None
        assert not model.wrong_slots(self.memory, self.shown, self.rank)

    def close(self) -> None:
        self.coverage.close()
        self.shared.close()
