"""Slots that are open while few ranks are left."""

from __future__ import annotations

import numpy as np
import pytest

from eep.experts.balancing.placement_log import BaseRecord
from eep.experts.placement.open_slots import count_open, narrow, used_slots, widen
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import CoverageError, Placement, count_moves, plan_placement
from eep.experts.standing import place
from eep.view import View

LAYERS, EXPERTS, RANKS, USUAL = 3, 16, 4, 5


@pytest.mark.parametrize(("ranks", "most", "opened"), [(4, 16, 5), (3, 16, 6), (2, 16, 8), (1, 16, 16), (1, 8, 8)])
def test_as_many_slots_are_open_as_it_takes(ranks: int, most: int, opened: int) -> None:
    assert count_open(EXPERTS, ranks, USUAL, most) == opened


def test_a_placement_with_more_slots_is_the_same_placement() -> None:
    small = Placement(np.array([[0, 1, 2, EMPTY], [3, EMPTY, 0, 1]]), 4, 2)
    wide = widen(small, 3)
    assert wide.physical_to_logical.tolist() == [[0, 1, EMPTY, 2, EMPTY, EMPTY], [3, EMPTY, EMPTY, 0, 1, EMPTY]]
    assert narrow(wide, 2).digest == small.digest
    assert (used_slots(wide), used_slots(narrow(wide, 1))) == (2, 1)


@pytest.fixture
def base() -> BaseRecord:
    load = np.ones((LAYERS, EXPERTS))
    first = plan_placement(load, None, range(RANKS), USUAL, [0] * RANKS)
    return BaseRecord.of(widen(first, EXPERTS), load, 0, open_slots=USUAL)


def test_every_expert_is_covered_however_many_ranks_are_left(base: BaseRecord) -> None:
    for active in [(0, 1, 2, 3), (0, 2, 3), (1, 3), (2,)]:
        placed = place(View(1, active, (0,) * RANKS), base)
        assert not placed.degraded
        assert used_slots(placed) == count_open(EXPERTS, len(active), USUAL, EXPERTS)
        assert not (placed.physical_to_logical != placed.on(active).physical_to_logical).any()


def test_when_all_are_back_so_is_the_first_placement(base: BaseRecord) -> None:
    assert place(View(1, (0, 1, 2, 3), (0,) * RANKS), base).digest == base.placement.digest


def test_what_is_left_stays_where_it_is(base: BaseRecord) -> None:
    """Two of four ranks: each keeps what it has, and gets what the lost ones had."""
    placed, active = place(View(1, (0, 1), (0,) * RANKS), base), (0, 1)
    held = base.placement.on(active)
    uncovered = int((held.replica_counts == 0).sum())
    assert count_moves(held, placed) >= uncovered
    kept = (held.physical_to_logical != EMPTY) & (held.physical_to_logical == placed.physical_to_logical)
    assert kept.sum() >= (held.physical_to_logical != EMPTY).sum() - (LAYERS * 2 * 8 - uncovered)


def test_addresses_for_too_few_slots_are_a_shortage(base: BaseRecord) -> None:
    small = BaseRecord.of(narrow(base.placement, 6), base.demand, 0, open_slots=USUAL)
    with pytest.raises(CoverageError):
        place(View(1, (0, 1), (0,) * RANKS), small)
