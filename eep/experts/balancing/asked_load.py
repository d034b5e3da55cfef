"""What gates ask for, counted by each rank, and summed over all of them and over as many looks as tell most. Pure.

Each rank counts from its start on. What it has counted since the last look is what it saw meanwhile. How much of what was
seen before still counts, what was seen decides itself. Where the load moves on, the newest look says best what comes next.
Where looks differ by chance, or by what few prompts happen to be about, many looks say it better than one: moves for the
newest look alone would be undone for the next. So there are several memories, from short to long. The load is that of the
memory which has foretold the last looks best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from eep.experts.placement.packing import EMPTY, FloatArray
from eep.experts.placement.slot_plan import Placement

_KEPT = (0.0, 0.5, 0.75, 0.875)
"""Of each memory: how much of what was seen before still counts at each look. The first knows the newest look only."""
_MISSES_KEPT = 0.75
"""How much of what a memory has foretold wrong still counts at each look."""
_LEAST_GAIN = 0.001
"""What a dose must gain, of what an average rank has to do. A dose writes a few slots of each rank."""
_LEAST_PICKS = 16
"""How often an average expert must have been picked, lest chance looks like load."""


class AskedLoad:
    """``load[layer, expert]``, from what each life of a rank, by name, has counted."""

    def __init__(self, layers: int, experts: int) -> None:
        self.load: FloatArray = np.zeros((layers, experts))
        self._memories: list[FloatArray] = [self.load] * len(_KEPT)
        self._missed: FloatArray = np.zeros(len(_KEPT))
        self._seen: dict[str, FloatArray] = {}

    def look(self, counted: Mapping[str, FloatArray]) -> None:
        """``counted``: what each rank of the view has counted so far. A rank that is new here was not looked at before."""
        fresh = np.zeros_like(self.load)
        for life, counts in counted.items():
            fresh += np.maximum(counts - self._seen.get(life, counts), 0.0)
        self._seen = dict(counted)
        if not fresh.any():
            return  # a pause says nothing about the load after it
        misses = [float(np.abs(_shares(memory) - _shares(fresh)).sum()) for memory in self._memories]
        self._missed = _MISSES_KEPT * self._missed + misses
        self._memories = [kept * memory + fresh for kept, memory in zip(_KEPT, self._memories, strict=True)]
        self.load = self._memories[int(self._missed.argmin())]

    @property
    def is_enough(self) -> bool:
        """Whether every layer has picked enough for a plan."""
        return bool((self.load.sum(axis=1) >= _LEAST_PICKS * self.load.shape[1]).all())


def _shares(load: FloatArray) -> FloatArray:
    """Of each expert, in what its layer has picked."""
    return np.asarray(load / np.maximum(load.sum(axis=1, keepdims=True), 1.0))


def balancedness(placement: Placement, load: FloatArray) -> FloatArray:
    """``[layers]``: what an average rank has to do over what the busiest has: 1 if all have the same."""
    return 1.0 / placement.imbalance(load)


def is_worth(before: Placement, after: Placement, load: FloatArray) -> bool:
    """Whether moves promise more than chance does, and more than they cost. Of ``n`` picks, a rank gets some ``sqrt(n)`` more
    or fewer by chance, and the busiest one looks busier by about that."""
    ranks = int(
        (before.physical_to_logical.reshape(before.layers, before.max_ranks, -1) != EMPTY).any(axis=(0, 2)).sum()
    )
    picks = max(1.0, float(load.sum(axis=1).mean()) / ranks)
    gain = float((before.imbalance(load) - after.imbalance(load)).mean())
    return gain > _LEAST_GAIN + 1 / math.sqrt(picks)
