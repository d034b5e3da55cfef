"""What gates ask for, counted by each rank, summed over all of them, and more so the newer it is. Pure.

Each rank counts from its start on. What it has counted since the last look is what it saw meanwhile. Half of what was seen
before still counts at each look, so a load that changes shows after a few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from eep.experts.placement.packing import EMPTY, FloatArray
from eep.experts.placement.slot_plan import Placement

_KEPT = 0.5
_LEAST_GAIN = 0.001
"""What a dose must gain, of what an average rank has to do. A dose writes a few slots of each rank."""
_LEAST_PICKS = 16
"""How often an average expert must have been picked, lest chance looks like load."""


class AskedLoad:
    """``load[layer, expert]``, from what each life of a rank, by name, has counted."""

    def __init__(self, layers: int, experts: int) -> None:
        self.load: FloatArray = np.zeros((layers, experts))
        self._seen: dict[str, FloatArray] = {}

    def look(self, counted: Mapping[str, FloatArray]) -> None:
        """``counted``: what each rank of the view has counted so far. A rank that is new here was not looked at before."""
        fresh = np.zeros_like(self.load)
        for life, counts in counted.items():
            fresh += np.maximum(counts - self._seen.get(life, counts), 0.0)
        self._seen = dict(counted)
        self.load = _KEPT * self.load + fresh

    @property
    def is_enough(self) -> bool:
        """Whether every layer has picked enough for a plan."""
        return bool((self.load.sum(axis=1) >= _LEAST_PICKS * self.load.shape[1]).all())


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
