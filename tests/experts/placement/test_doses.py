"""A dose of moves: sound, within its limits, worth its cost, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.repair.eplb_greedy import eplb_greedy
from eep.experts.placement.doses import DoseLimits, plan_dose
from eep.experts.placement.packing import find_owned
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement
from tests.experts.placement.test_slot_plan import assert_sound, instances, relaxed


@relaxed
@given(instances(), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_dose_is_sound_and_within_its_limits(
    instance: tuple[np.ndarray, int, list[int]], writes: int, layers: int, data: st.DataObject
) -> None:
    load, slots, topology = instance
    experts, every = load.shape[1], list(range(len(topology)))
    fewest = -(-experts // slots)
    active = sorted(data.draw(st.sets(st.sampled_from(every), min_size=fewest)))
    first = plan_placement(np.ones_like(load), None, every, slots, topology)
    before = plan_placement(np.ones_like(load), first, active, slots, topology)
    after = plan_dose(load, before, active, topology, DoseLimits(writes, layers))
    assert_sound(after, active, experts)
    written = (before.physical_to_logical != after.physical_to_logical).reshape(len(load), len(topology), slots)
    assert written.sum(axis=(0, 2)).max(initial=0) <= writes
    assert written.any(axis=(1, 2)).sum() <= layers
    assert after.imbalance(load).max() <= before.imbalance(load).max() * (1 + 1e-9)
    again = plan_dose(load.copy(), before, reversed(active), list(topology), DoseLimits(writes, layers))
    assert again.digest == after.digest


def hot(experts: int, *which: int) -> np.ndarray:
    load = np.ones((1, experts))
    load[0, list(which)] = 10.0
    return load


def test_a_hot_expert_gets_a_further_copy_in_the_place_of_one_that_is_not_needed() -> None:
    before = Placement(np.array([[0, 1, 2, 3, 4, 5, 6, 0]]), 7, 2)
    after = plan_dose(hot(7, 2), before, range(4), [0] * 4, DoseLimits(1))
    assert after.replica_counts[0, 2] == 2
    assert after.replica_counts[0, 0] == 1
    assert count_moves(before, after) == 1


def test_two_hot_experts_of_one_rank_part() -> None:
    before = Placement(np.array([[0, 1, 2, 3]]), 4, 2)
    after = plan_dose(hot(4, 0, 1), before, range(2), [0, 0], DoseLimits(8))
    assert count_moves(before, after) == 2
    assert after.imbalance(hot(4, 0, 1)).max() == pytest.approx(1.0)


def test_nothing_moves_for_a_gain_that_is_not_worth_it() -> None:
    before = Placement(np.array([[0, 1, 2, 3]]), 4, 2)
    load = np.array([[1.001, 1.0, 1.0, 1.0]])
    assert plan_dose(load, before, range(2), [0, 0], DoseLimits(8)) is before
    assert plan_dose(np.zeros((1, 4)), before, range(2), [0, 0], DoseLimits(8)) is before


def test_what_inactive_ranks_hold_stays() -> None:
    before = Placement(np.array([[0, 1, 2, 3, 0, 1]]), 4, 2)
    after = plan_dose(hot(4, 0, 1), before, range(2), [0] * 3, DoseLimits(8))
    assert after.physical_to_logical[0, 4:].tolist() == [0, 1]
    assert after.digest != before.digest


def test_an_exchange_leaves_an_expert_its_two_hosts() -> None:
    """Expert 0 is on both hosts. To even out, it could only go to the other rank of the same host."""
    before = Placement(np.array([[0, 1, 2, 3, 0, 4, 5, 6]]), 7, 2)
    after = plan_dose(hot(7, 0, 1), before, range(4), [0, 0, 1, 1], DoseLimits(8))
    owned = find_owned(after.physical_to_logical, 7, 2)[0]
    assert owned[:2, 0].any()
    assert owned[2:, 0].any()


def test_doses_follow_a_load_that_drifts_as_well_as_a_plan_from_scratch_with_a_tenth_of_its_moves() -> None:
    rng = np.random.default_rng(5)
    layers, experts, ranks, slots = 6, 64, 8, 9
    logs = rng.normal(0, 1, (layers, experts))
    ours = theirs = plan_placement(np.exp(logs), None, range(ranks), slots, [0] * ranks)
    moves, their_moves, uneven, their_uneven = 0, 0, [], []
    for _ in range(10):
        logs = 0.98 * logs + np.sqrt(1 - 0.98**2) * rng.normal(0, 1, logs.shape)
        load = np.exp(logs)
        before, their_before = ours, theirs
        ours = plan_dose(load, ours, range(ranks), [0] * ranks, DoseLimits(32))
        theirs = Placement(eplb_greedy(load, ranks, slots), experts, slots)
        moves, their_moves = moves + count_moves(before, ours), their_moves + count_moves(their_before, theirs)
        uneven.append(ours.imbalance(load).mean())
        their_uneven.append(theirs.imbalance(load).mean())
    assert np.mean(uneven) < 1.05 * np.mean(their_uneven)
    assert moves < 0.1 * their_moves
