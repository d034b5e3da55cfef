"""What doses must reach on loads of every kind: nearly as even as the greedy balancer, with few of its moves."""

from __future__ import annotations

import numpy as np
import pytest

from bench.balance.contenders import Follower, follow_trace
from bench.balance.traces import TRACES, loads, recorded_loads
from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import plan_placement

GREEDY = "DeepSeek's greedy balancer"


def follow(trace: list[FloatArray], hosts: list[int], slots: int) -> tuple[Follower, Follower]:
    """Doses, and the greedy balancer. One rank is lost for a quarter of the looks."""
    start = plan_placement(trace[0], None, range(len(hosts)), slots, hosts)
    between = range(len(trace) // 2, len(trace) * 3 // 4)
    followers = follow_trace(trace, start, hosts, 5, between)
    return followers["doses"], followers[GREEDY]


def is_nearly_as_even(ours: Follower, theirs: Follower) -> bool:
    return bool(np.mean(ours.busiest[4:]) <= 1.05 * np.mean(theirs.busiest[4:]))


@pytest.mark.parametrize("trace", TRACES)
def test_doses_keep_up_with_the_greedy_balancer_at_a_tenth_of_its_moves(trace: str) -> None:
    ours, theirs = follow(list(loads(trace, 3, 128, 20, seed=7)), [rank // 4 for rank in range(16)], 9)
    assert is_nearly_as_even(ours, theirs)
    assert 0 < ours.moves < 0.1 * theirs.moves


def test_doses_do_not_run_after_a_recorded_load_that_jumps() -> None:
    ours, theirs = follow(recorded_loads(), [rank // 4 for rank in range(16)], 5)
    assert is_nearly_as_even(ours, theirs)
    assert 0 < ours.moves < 0.1 * theirs.moves


def test_doses_keep_up_where_hosts_have_unequally_many_ranks() -> None:
    ours, theirs = follow(list(loads("slow drift", 3, 128, 20, seed=7)), [0] * 7 + [1] * 5 + [2] * 4, 9)
    assert is_nearly_as_even(ours, theirs)
    assert 0 < ours.moves < 0.1 * theirs.moves
