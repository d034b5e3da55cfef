"""Every expert is on two hosts where slots allow: then any one host may go, and nothing has to be brought in."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eep.experts.placement.margin import find_margin
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement

relaxed = settings(max_examples=80)


def most_experts(slots: int, topology: list[int]) -> int:
    """How many experts can have two hosts each: a host has use for one copy of each."""
    room = [topology.count(host) * slots for host in set(topology)]
    return max(each for each in range(sum(room)) if sum(min(each, its) for its in room) >= 2 * each)


@st.composite
def several_hosts(draw: st.DrawFn) -> tuple[np.ndarray, int, list[int]]:
    """(load, slots per rank, topology). Hosts may have different numbers of ranks. Two hosts can have each expert."""
    hosts = draw(st.integers(2, 4))
    topology = [host for host in range(hosts) for _ in range(draw(st.integers(1, 4)))]
    topology = draw(st.permutations(topology))
    slots = draw(st.integers(1, 6))
    most = most_experts(slots, topology)
    experts = draw(st.just(most) | st.integers(1, most))
    seed, layers = draw(st.integers(0, 1 << 32)), draw(st.integers(1, 3))
    load = np.random.default_rng(seed).lognormal(0, draw(st.sampled_from([0.0, 1.0, 2.0])), (layers, experts))
    return load, slots, topology


def ranks_off(host: int, topology: list[int]) -> list[int]:
    return [rank for rank, its in enumerate(topology) if its != host]


def hosts_of(placement: Placement, topology: list[int], layer: int, expert: int) -> set[int]:
    slots = np.flatnonzero(placement.physical_to_logical[layer] == expert)
    return {topology[slot // placement.slots_per_rank] for slot in slots.tolist()}


@relaxed
@given(several_hosts())
def test_any_host_may_go_where_there_are_enough_slots(instance: tuple[np.ndarray, int, list[int]]) -> None:
    load, slots, topology = instance
    every = list(range(len(topology)))
    placement = plan_placement(load, None, every, slots, topology, least_copies=2)
    for host in set(topology):
        left = ranks_off(host, topology)
        assert (placement.on(left).replica_counts > 0).all()
        after = plan_placement(load, placement, left, slots, topology, least_copies=2)
        assert count_moves(placement.on(left), after) == 0
    assert find_margin(placement, every, topology).any_hosts >= 1


def test_a_host_has_use_for_one_copy_of_each_expert() -> None:
    assert most_experts(4, [0, 0, 1, 1]) == 8
    assert most_experts(4, [0, 0, 0, 1]) == 4
    assert most_experts(1, [0, 1, 2]) == 1


@relaxed
@given(several_hosts(), st.data())
def test_what_makes_room_is_not_the_copy_on_a_second_host(
    instance: tuple[np.ndarray, int, list[int]], data: st.DataObject
) -> None:
    """When ranks are lost, an expert loses its second host only if no other copy could make room."""
    load, slots, topology = instance
    experts = load.shape[1]
    every = list(range(len(topology)))
    before = plan_placement(load, None, every, slots, topology, least_copies=2)
    active = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    if len(active) * slots < experts:
        return
    left, after = before.on(active), plan_placement(load, before, active, slots, topology, least_copies=2)
    for layer in range(before.layers):
        uncovered = int((left.replica_counts[layer] == 0).sum())
        hosts = {expert: hosts_of(left, topology, layer, expert) for expert in range(experts)}
        # Copies that an expert can do without and stay on as many hosts, up to two, and ranks as it is now.
        spare = sum(max(0, int(left.replica_counts[layer, e]) - 2) for e, its in hosts.items() if len(its) > 0)
        if uncovered > spare:
            continue
        for expert, its in hosts.items():
            if len(its) > 1:
                assert len(hosts_of(after, topology, layer, expert)) > 1
    assert count_moves(left, after) <= max(
        count_moves(left, plan_placement(load, before, active, slots, topology)), int((left.replica_counts == 0).sum())
    )


@relaxed
@given(several_hosts())
def test_ranks_of_all_hosts_plan_the_same(instance: tuple[np.ndarray, int, list[int]]) -> None:
    """However hosts are numbered, and in whatever order ranks are named."""
    load, slots, topology = instance
    every = list(range(len(topology)))
    first = plan_placement(load, None, every, slots, topology, least_copies=2)
    assert plan_placement(load.copy(), None, every[::-1], slots, tuple(topology), least_copies=2).digest == first.digest
    again = plan_placement(load, first, every, slots, topology, least_copies=2)
    assert count_moves(first, again) == 0


def test_small_hosts_are_not_used_up_by_the_first_experts() -> None:
    """The coolest ranks are those of the small hosts. Were both copies of one expert there, the last would have one host."""
    for seed in range(20):
        load = np.random.default_rng(seed).lognormal(0, 2, (4, 12))
        topology = [0, 0, 0, 1, 2, 2, 2, 2]
        placement = plan_placement(load, None, range(8), 3, topology, least_copies=2)
        assert find_margin(placement, range(8), topology).hosts == (0, 1, 2)
