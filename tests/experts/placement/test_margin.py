"""The margin query against the definition, spelled out with sets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eep.experts.placement.margin import Margin, find_margin
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, list[int], list[int]]:
    ranks, slots, experts = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    cells = st.lists(st.integers(EMPTY, experts - 1), min_size=ranks * slots, max_size=ranks * slots)
    table = np.array([draw(cells) for _ in range(draw(st.integers(1, 3)))])
    active = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    topology = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    return Placement(table, experts, slots).on(active), active, topology


def served(placement: Placement, ranks: set[int]) -> set[tuple[int, int]]:
    cells = placement.on(ranks).physical_to_logical if ranks else np.full((1, 1), EMPTY)
    return {(int(row), int(cells[row, slot])) for row, slot in zip(*np.nonzero(cells != EMPTY), strict=True)}


@settings(max_examples=200)
@given(placements())
def test_margin_is_what_it_says(case: tuple[Placement, list[int], list[int]]) -> None:
    placement, active, topology = case
    everything = served(placement, set(active))

    def survives(lost: set[int]) -> bool:
        left = set(active) - lost
        return bool(left) and served(placement, left) == everything

    def any_survive(number: int) -> bool:
        return all(survives(set(lost)) for lost in combinations(active, number))

    hosts = sorted({topology[rank] for rank in active})
    found = find_margin(placement, active, topology)
    assert any_survive(found.any_ranks)
    assert not any_survive(found.any_ranks + 1)
    assert found.ranks == tuple(rank for rank in active if survives({rank}))
    assert found.pairs == tuple(pair for pair in combinations(active, 2) if survives(set(pair)))
    assert found.hosts == tuple(h for h in hosts if survives({r for r in active if topology[r] == h}))

    def any_hosts_survive(number: int) -> bool:
        return all(survives({r for r in active if topology[r] in lost}) for lost in combinations(hosts, number))

    assert any_hosts_survive(found.any_hosts)
    assert not any_hosts_survive(found.any_hosts + 1)


def test_repairable_ranks_counts_slots() -> None:
    placement = Placement(np.array([[0, 1, 2, 3, 4, 5, 0, 1]]), experts=6, slots_per_rank=2)
    assert find_margin(placement, range(4), [0, 0, 1, 1]) == Margin(0, (0, 3), (), (), 1, 0)


def test_margin_refuses_ranks_that_do_not_exist() -> None:
    placement = Placement(np.array([[0, 1]]), experts=2, slots_per_rank=1)
    with pytest.raises(ValueError, match="do not fit"):
        find_margin(placement, [0, 5], [0, 0])
