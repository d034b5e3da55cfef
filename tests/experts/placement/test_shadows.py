"""Copies that get no tokens: the busiest rank is less busy without them, and after a loss they serve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eep.experts.placement.doses import DoseLimits, plan_dose
from eep.experts.placement.margin import find_margin
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.shadows import choose_routed, count_shadows
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement
from tests.experts.placement.test_slot_plan import instances, relaxed


@relaxed
@given(instances(), st.data())
def test_every_expert_keeps_a_copy_and_no_layer_gets_busier(
    instance: tuple[np.ndarray, int, list[int]], data: st.DataObject
) -> None:
    load, slots, topology = instance
    placement = plan_placement(load[:, ::-1], None, range(len(topology)), slots, topology)
    routed = choose_routed(placement, load)
    assert ((routed.replica_counts > 0) == (placement.replica_counts > 0)).all()
    kept = routed.physical_to_logical != EMPTY
    assert (routed.physical_to_logical[kept] == placement.physical_to_logical[kept]).all()
    assert (routed.imbalance(load) <= placement.imbalance(load) * (1 + 1e-6)).all()


def test_a_second_copy_on_a_busy_rank_gets_no_tokens() -> None:
    """Expert 2 would bring half of its load to the rank that has the hot one."""
    placement = Placement(np.array([[0, 2, 1, 2]]), 3, 2)
    load = np.array([[10.0, 1.0, 4.0]])
    routed = choose_routed(placement, load)
    assert routed.physical_to_logical.tolist() == [[0, EMPTY, 1, 2]]
    assert count_shadows(placement, routed) == 1
    assert choose_routed(placement.on([0]), load).physical_to_logical.tolist() == [[0, 2, EMPTY, EMPTY]], (
        "it serves now"
    )


def skewed(layers: int, experts: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 1.5, (layers, experts))


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_any_one_rank_or_host_may_go_without_a_byte_moved(hosts: int, seed: int) -> None:
    """Where there are two slots for each expert, however uneven the load; and after doses of moves, too."""
    ranks, experts, slots = 8, 16, 5
    topology = [rank * hosts // ranks for rank in range(ranks)]
    every, load = list(range(ranks)), skewed(3, experts, seed)
    placement = plan_placement(load, None, every, slots, topology, least_copies=2)
    for step in range(4):
        margin = find_margin(placement, every, topology)
        assert margin.any_ranks >= 1
        assert margin.ranks == tuple(every)
        assert hosts == 1 or margin.hosts == tuple(range(hosts))
        for lost in every:
            left = [rank for rank in every if rank != lost]
            after = plan_placement(load, placement, left, slots, topology, least_copies=2)
            assert count_moves(placement.on(left), after) == 0
            assert (choose_routed(after, load).replica_counts > 0).all()
        load = skewed(3, experts, 100 * step + seed)
        limits = DoseLimits(4, least_copies=2)
        placement = plan_dose(load, placement, every, topology, limits)


def test_without_asking_hot_experts_take_all_the_copies() -> None:
    load = np.ones((1, 8))
    load[0, 0] = 1000.0
    placement = plan_placement(load, None, range(4), 4, [0] * 4)
    assert find_margin(placement, range(4), [0] * 4).any_ranks == 0
    placement = plan_placement(load, None, range(4), 4, [0] * 4, least_copies=2)
    assert find_margin(placement, range(4), [0] * 4).any_ranks == 1


def test_where_slots_are_short_as_many_experts_as_possible_have_two() -> None:
    load = skewed(2, 12, 3)
    placement = plan_placement(load, None, range(4), 5, [0] * 4, least_copies=2)
    assert (placement.replica_counts >= 2).sum(axis=1).tolist() == [8, 8]
    assert (placement.replica_counts >= 3).sum() == 0
