"""Which copies of experts get tokens. The others are shadows: they make no rank busier, and serve when a rank is lost. Pure.

A copy is there for two reasons: to share the load of its expert, and to save it when a rank is lost. Where slots allow, every
expert has a second copy for the second reason alone. Such a copy may be on a rank that has enough to do. So a copy gets no
tokens if the busiest rank of its layer is less busy without it. A shadow needs nothing but routing tables to serve.
"""

from __future__ import annotations

import numpy as np

from eep.experts.placement.packing import EMPTY, BoolArray, FloatArray, IntArray
from eep.experts.placement.slot_plan import Placement


def choose_routed(placement: Placement, load: FloatArray) -> Placement:
    """``placement`` without its shadows: the copies to which tokens go. Every expert that has a copy keeps one."""
    table = placement.physical_to_logical.copy()
    for layer in range(placement.layers):
        serves = _choose(table[layer], load[layer], placement.slots_per_rank)
        table[layer, ~serves] = EMPTY
    return Placement(table, placement.experts, placement.slots_per_rank)


def count_shadows(placement: Placement, routed: Placement) -> int:
    return int((placement.physical_to_logical != routed.physical_to_logical).sum())


def _choose(slots: IntArray, load: FloatArray, size: int) -> BoolArray:
    """``[slots]``: which of them serve."""
    serves = slots != EMPTY
    ranks = len(slots) // size
    rank, expert = np.arange(len(slots)) // size, np.maximum(slots, 0)
    count = np.bincount(expert[serves], minlength=len(load))
    holds = np.zeros((len(load), ranks), dtype=bool)
    holds[expert[serves], rank[serves]] = True
    while True:
        share = load / np.maximum(count, 1)
        busy = np.zeros(ranks)
        np.add.at(busy, rank[serves], share[expert[serves]])
        worst = int(busy.argmax())
        spare = np.flatnonzero(serves & (rank == worst) & (count[expert] > 1))
        if not len(spare) or busy[worst] <= 0:
            return np.asarray(serves)
        # Without a copy, the others of its expert take over its share.
        asked = expert[spare]
        others = holds[asked].copy()
        others[:, worst] = False
        after = busy + others * (load[asked] / (count[asked] - 1) - share[asked])[:, None]
        after[:, worst] = busy[worst] - share[asked]
        busiest = after.max(axis=1)
        best = int(busiest.argmin())
        if busiest[best] >= busy[worst] * (1 - 1e-9):
            return np.asarray(serves)
        gone = spare[best]
        serves[gone] = False
        holds[expert[gone], worst] = False
        count[expert[gone]] -= 1
