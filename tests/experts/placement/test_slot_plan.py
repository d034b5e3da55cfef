"""The planner: coverage, distinct ranks and hosts, fewest moves, determinism, balance, the policies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.repair.eplb_greedy import eplb_greedy
from eep.abi.peer_table import MAX_RANKS
from eep.experts.placement.packing import EMPTY, Cluster, IntArray, take_turns, turn_order
from eep.experts.placement.slot_plan import CoverageError, Placement, count_moves, plan_placement
from eep.experts.placement.strategies import fewest_moves

# Hypothesis measures time to find slow examples; on a loaded machine that says nothing.
relaxed = settings(max_examples=150)


@st.composite
def instances(draw: st.DrawFn) -> tuple[np.ndarray, int, list[int]]:
    """(load, slots per rank, topology) of a small instance; all ranks together can hold all experts."""
    ranks = draw(st.integers(1, 8))
    experts = draw(st.integers(1, 20))
    slots = draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 4))
    topology = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    layers = draw(st.integers(1, 4))
    values = st.floats(0, 1e6, allow_nan=False) | st.sampled_from([0.0, 1.0])
    load = [draw(st.lists(values, min_size=experts, max_size=experts)) for _ in range(layers)]
    return np.array(load), slots, topology


def by_rank(placement: Placement) -> IntArray:
    return placement.physical_to_logical.reshape(placement.layers, placement.max_ranks, -1)


def assert_sound(placement: Placement, active: list[int], experts: int) -> None:
    """Every expert is covered, on active ranks only, and no rank holds two copies of one."""
    assert placement.on(active).digest == placement.digest
    assert not placement.degraded
    assert placement.replica_counts.sum() == (placement.physical_to_logical != EMPTY).sum()
    for layer in by_rank(placement):
        for slots in layer:
            held = slots[slots != EMPTY]
            assert len(set(held.tolist())) == len(held)
    for layer, expert in np.ndindex(placement.layers, experts):
        slots = placement.logical_to_physical[layer, expert]
        slots = slots[slots != EMPTY]
        assert (placement.physical_to_logical[layer, slots] == expert).all()
        assert len(slots) == placement.replica_counts[layer, expert]


@relaxed
@given(instances())
def test_a_fresh_placement_is_sound_and_uses_every_slot(instance: tuple[np.ndarray, int, list[int]]) -> None:
    load, slots, topology = instance
    ranks = list(range(len(topology)))
    placement = plan_placement(load, None, ranks, slots, topology)
    assert_sound(placement, ranks, load.shape[1])
    idle = (placement.physical_to_logical == EMPTY).sum(axis=1)
    assert (idle == max(0, slots - load.shape[1]) * len(ranks)).all()


@relaxed
@given(instances(), st.data())
def test_losses_and_returns_move_only_what_they_must(
    instance: tuple[np.ndarray, int, list[int]], data: st.DataObject
) -> None:
    load, slots, topology = instance
    experts = load.shape[1]
    all_ranks = list(range(len(topology)))
    placement = plan_placement(load, None, all_ranks, slots, topology)
    for _ in range(4):
        active = sorted(data.draw(st.sets(st.sampled_from(all_ranks), min_size=1)))
        if len(active) * slots < experts:
            with pytest.raises(CoverageError):
                plan_placement(load, placement, active, slots, topology)
            continue
        after = plan_placement(load, placement, active, slots, topology)
        assert_sound(after, active, experts)
        left = placement.on(active)
        columns = np.concatenate([np.arange(rank * slots, (rank + 1) * slots) for rank in active])
        bound = fewest_moves(left.physical_to_logical[:, columns], experts)
        # A rank with more slots than there are experts leaves some idle: they are not written.
        bound -= max(0, slots - experts) * len(active)
        written = (after.physical_to_logical != left.physical_to_logical)[:, columns]
        uncovered = (left.replica_counts == 0).sum(axis=1)
        assert (written.sum(axis=1) <= np.maximum(bound, uncovered)).all()
        assert count_moves(left, after) == written.sum()
        placement = after


@relaxed
@given(instances(), st.floats(0, 3))
def test_extra_moves_stay_within_their_budget(instance: tuple[np.ndarray, int, list[int]], extra: float) -> None:
    load, slots, topology = instance
    all_ranks = list(range(len(topology)))
    placement = plan_placement(load, None, all_ranks, slots, topology)
    active = all_ranks[: max(1, -(-load.shape[1] // slots))]
    fewest = plan_placement(load, placement, active, slots, topology)
    more = plan_placement(load[:, ::-1], placement, active, slots, topology, extra_moves=extra)
    assert_sound(more, active, load.shape[1])
    left = placement.on(active)
    columns = np.concatenate([np.arange(rank * slots, (rank + 1) * slots) for rank in active])
    bound = int(fewest_moves(left.physical_to_logical[:, columns], load.shape[1]).sum())
    assert count_moves(left, more) <= count_moves(left, fewest) + int(extra * bound)


@relaxed
@given(instances())
def test_the_same_arguments_give_the_same_placement(instance: tuple[np.ndarray, int, list[int]]) -> None:
    load, slots, topology = instance
    all_ranks = list(range(len(topology)))
    first = plan_placement(load, None, all_ranks, slots, topology)
    assert plan_placement(load.copy(), None, reversed(all_ranks), slots, list(topology)).digest == first.digest
    again = plan_placement(load, first, all_ranks, slots, topology)
    assert again.digest == first.digest, "nothing was lost, so nothing may move"


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(256, 8, 37), (256, 16, 18), (128, 8, 19), (256, 32, 9)])
def test_what_was_lost_is_brought_in_by_all_who_are_left(experts: int, ranks: int, slots: int) -> None:
    load, topology = np.ones((48, experts)), [0] * ranks
    first = plan_placement(load, None, range(ranks), slots, topology)
    for lost in range(ranks):
        active = [rank for rank in range(ranks) if rank != lost]
        after = plan_placement(load, first, active, slots, topology)
        written = after.physical_to_logical != first.on(active).physical_to_logical
        assert written.any(), "nothing was lost with the rank: the test tests nothing"
        by_each = written.reshape(-1, ranks, slots).sum(axis=(0, 2))[active]
        assert by_each.max() <= 1.4 * by_each.mean()


@relaxed
@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 9))
def test_ranks_take_turns_with_those_of_their_host(hosts: list[int], layers: int) -> None:
    cluster = Cluster(2, np.unique(hosts, return_inverse=True)[1], len(hosts))
    order = turn_order(cluster, layers)
    assert (np.sort(order, axis=1) == np.arange(len(hosts))).all()
    assert (cluster.host[order] == cluster.host).all()
    slots = np.arange(layers * len(hosts) * 2).reshape(layers, -1)
    there = take_turns(slots, order, 2)
    assert (take_turns(there, np.argsort(order, axis=1), 2) == slots).all()


def test_a_rank_of_many_is_lost_and_returns() -> None:
    """As many ranks as the data plane of a CPU serves, eight to a host, and half as many slots again as experts."""
    ranks, experts = MAX_RANKS, 2 * MAX_RANKS // 3
    load, topology = np.ones((2, experts)), [rank // 8 for rank in range(ranks)]
    first = plan_placement(load, None, list(range(ranks)), 1, topology)
    assert_sound(first, list(range(ranks)), experts)
    left = [rank for rank in range(ranks) if rank != ranks - 12]
    smaller = plan_placement(load, first, left, 1, topology)
    assert_sound(smaller, left, experts)
    assert count_moves(first, smaller) <= load.shape[0]
    assert_sound(plan_placement(load, smaller, list(range(ranks)), 1, topology), list(range(ranks)), experts)


def test_copies_are_on_different_hosts_when_hosts_have_room() -> None:
    load = np.random.default_rng(3).lognormal(0, 1, (20, 64))
    topology = [rank // 4 for rank in range(16)]
    placement = plan_placement(load, None, range(16), 6, topology)
    assert (placement.replica_counts > 1).any(axis=1).all(), "a layer without copies tests nothing"
    for layer, expert in np.ndindex(20, 64):
        slots = placement.logical_to_physical[layer, expert]
        slots = slots[slots != EMPTY]
        assert len({topology[slot // 6] for slot in slots}) >= min(2, len(slots))


LOADS = {
    f"lognormal {skew}": np.random.default_rng(11).lognormal(0, skew, (8, 256)) for skew in (0.3, 0.7, 1.0, 1.5)
} | {"zipf": 1 / np.arange(1.0, 257.0)[None]}


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_balance_is_within_five_percent_of_the_greedy_yardstick(kind: str, lost: int) -> None:
    load = LOADS[kind]
    topology = [rank // 8 for rank in range(32)]
    active = range(32 - lost)
    yardstick = Placement(eplb_greedy(load, len(active), 9), 256, 9).imbalance(load)
    start = plan_placement(load, None, range(32), 9, topology)
    ours = plan_placement(load, start, active, 9, topology, extra_moves=math.inf).imbalance(load)
    assert (ours <= yardstick * 1.05).all()


def test_more_moves_make_it_more_even() -> None:
    load = np.random.default_rng(5).lognormal(0, 1, (8, 256))
    topology = [0] * 32
    start = plan_placement(load, None, range(32), 9, topology)
    worst = [
        plan_placement(load, start, range(31), 9, topology, extra_moves=e).imbalance(load).max() for e in (0, 1, 4)
    ]
    assert worst[0] > worst[1] > worst[2]


def test_too_few_slots_are_refused_with_the_way_out() -> None:
    load = np.arange(1, 11, dtype=float)[None, :].repeat(2, axis=0)
    start = plan_placement(load, None, range(5), 2, [0] * 5)
    with pytest.raises(CoverageError) as caught:
        plan_placement(load, start, [0, 1, 2], 2, [0] * 5)
    assert caught.value.missing.sum(axis=1).tolist() == [4, 4]
    for part in ("hold 6 experts", "has 10", "Bring back 2 rank(s)", "give each rank 4 slots", "mask"):
        assert part in str(caught.value)


def test_masking_leaves_out_the_least_asked_for_and_moves_nothing_that_is_there() -> None:
    load = np.arange(1, 11, dtype=float)[None, :].repeat(2, axis=0)
    start = plan_placement(load, None, range(5), 2, [0] * 5)
    degraded = plan_placement(load, start, [0, 1, 2], 2, [0] * 5, when_short="mask")
    assert degraded.degraded
    assert degraded.masked.sum(axis=1).tolist() == [4, 4]
    left = start.on([0, 1, 2])
    assert count_moves(left, degraded) == 0
    assert (degraded.masked == (left.replica_counts == 0)).all()
    whole = plan_placement(load, degraded, range(5), 2, [0] * 5)
    assert not whole.degraded
    assert count_moves(degraded, whole) == 8


@relaxed
@given(instances(), st.data())
def test_masking_is_as_small_as_it_can_be(instance: tuple[np.ndarray, int, list[int]], data: st.DataObject) -> None:
    load, slots, topology = instance
    all_ranks = list(range(len(topology)))
    placement = plan_placement(load, None, all_ranks, slots, topology)
    active = sorted(data.draw(st.sets(st.sampled_from(all_ranks), min_size=1)))
    after = plan_placement(load, placement, active, slots, topology, when_short="mask")
    short = max(0, load.shape[1] - len(active) * slots)
    assert (after.masked.sum(axis=1) == short).all()


def test_a_copy_beside_its_twin_is_put_to_use() -> None:
    twins = Placement(np.array([[0, 0, 1, 1]]), experts=3, slots_per_rank=2)
    after = plan_placement(np.ones((1, 3)), twins, [0, 1], 2, [0, 0])
    assert_sound(after, [0, 1], 3)


def test_no_expert_gets_more_copies_than_the_tables_can_hold() -> None:
    load = np.ones((2, 8))
    load[:, 0] = 1000
    assert plan_placement(load, None, range(8), 4, [0] * 8).replica_counts.max() == 8
    assert plan_placement(load, None, range(8), 4, [0] * 8, max_copies=4).replica_counts.max() == 4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"load": np.ones(3)}, "layers, experts"),
        ({"load": np.array([[1.0, math.nan]])}, "finite"),
        ({"load": np.array([[1.0, -1.0]])}, "negative"),
        ({"active": []}, "no rank is active"),
        ({"active": [0, 9]}, "do not fit a topology"),
        ({"slots_per_rank": 0}, "at least one slot"),
        ({"max_copies": 0}, "at least one copy"),
        ({"when_short": "hope"}, "'refuse' or 'mask'"),
        ({"extra_moves": -0.1}, "cannot be negative"),
        ({"extra_moves": math.nan}, "cannot be negative"),
        ({"current": Placement(np.zeros((1, 2), dtype=np.int64), 2, 1)}, "current placement has"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(change: dict[str, object], complaint: str) -> None:
    good: dict[str, object] = {
        "load": np.ones((1, 4)), "current": None, "active": [0, 1], "slots_per_rank": 2, "topology": [0, 0],
    }  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        plan_placement(**{**good, **change})  # type: ignore[arg-type]


def test_a_placement_checks_its_own_table() -> None:
    with pytest.raises(ValueError, match="does not fit 2 slots"):
        Placement(np.zeros((1, 3), dtype=np.int64), 1, 2)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Placement(np.array([[0, 2]]), 2, 1)
