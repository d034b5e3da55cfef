"""Slots that a rank has addresses for, and those of them that are open: that have memory, and may hold experts. Pure.

A rank may have addresses for more slots than it has memory for. While few ranks are left, more of them are open. How many
follows from the view alone, so all ranks know it of each other.
"""

from __future__ import annotations

import numpy as np

from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement


def count_open(experts: int, ranks: int, usual: int, most: int) -> int:
    """How many slots of each rank are open while there are so many ranks: as many as usual, or as it takes to hold every
    expert. Never more than ``most``, also where that is too few."""
    return min(most, max(usual, -(-experts // ranks)))


def narrow(placement: Placement, slots: int) -> Placement:
    """The first ``slots`` of every rank."""
    shape = (placement.layers, placement.max_ranks, placement.slots_per_rank)
    table = placement.physical_to_logical.reshape(shape)[:, :, :slots].reshape(placement.layers, -1).copy()
    return Placement(table, placement.experts, slots)


def widen(placement: Placement, slots: int) -> Placement:
    """The same with ``slots`` for every rank. Those that are new are empty."""
    table = np.full((placement.layers, placement.max_ranks, slots), EMPTY, dtype=np.int64)
    table[:, :, : placement.slots_per_rank] = placement.physical_to_logical.reshape(
        placement.layers, placement.max_ranks, -1
    )
    return Placement(table.reshape(placement.layers, -1), placement.experts, slots)


def used_slots(placement: Placement) -> int:
    """How many slots of a rank are used, of the rank that uses most."""
    used = (placement.physical_to_logical.reshape(placement.layers, placement.max_ranks, -1) != EMPTY).any(axis=(0, 1))
    return int(np.flatnonzero(used).max(initial=-1)) + 1
