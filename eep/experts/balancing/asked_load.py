"""What gates ask for, counted by each rank, summed over all of them, and more so the newer it is. Pure.

Each rank counts from its start on. What it has counted since the last look is what it saw meanwhile. Half of what was seen
before still counts at each look, so a load that changes shows after a few.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import Placement

_KEPT = 0.5
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
