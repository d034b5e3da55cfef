from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eep.operations.instance_standing import InstanceStanding
from eep.operations.next_order import (
    NextStep,
    Order,
    OrdersDone,
    OrdersFailed,
    OrdersWait,
    next_step,
    undo,
    why_refused,
)
from tests.operations.instance import asks, standing, with_rank


def step(request: Any, now: InstanceStanding, *given: Order, origin: InstanceStanding | None = None) -> NextStep:
    return next_step(request, origin or standing(), now, given)


def test_a_rank_is_removed_and_is_out_once_the_others_have_settled() -> None:
    request, order = asks("remove", 2), Order("remove", 2)
    assert step(request, standing()) == order
    leaving = with_rank(standing(), 2, status="leaving", wanted=False)
    assert isinstance(step(request, leaving, order), OrdersWait)
    out = with_rank(standing(), 2, status="down", is_in=False, wanted=False)
    assert isinstance(step(request, replace(out, phase="AGREED"), order), OrdersWait)
    assert step(request, out, order) == OrdersDone("rank 2 is out")


def test_a_rank_that_is_out_is_removed_by_doing_nothing() -> None:
    assert isinstance(step(asks("remove", 5), standing()), OrdersDone)


def test_a_rank_is_launched_and_is_in_when_all_run() -> None:
    request, order = asks("launch", 4), Order("launch", 4)
    assert step(request, standing()) == order
    assert isinstance(step(request, with_rank(standing(), 4, status="starting", wanted=True), order), OrdersWait)
    joined = with_rank(standing(), 4, status="ready", is_in=True, wanted=True)
    assert isinstance(step(request, replace(joined, phase="AGREED"), order), OrdersWait)
    assert isinstance(step(request, joined, order), OrdersDone)
    assert isinstance(step(asks("launch", 1), standing()), OrdersDone), "it is in"


@pytest.mark.parametrize("fields", [{"status": "resting", "failures": 3}, {"status": "down"}, {"status": "stuck"}])
def test_a_rank_that_does_not_start_fails_the_launch_for_good(fields: dict[str, Any]) -> None:
    outcome = step(asks("launch", 4), with_rank(standing(), 4, wanted=True, **fields), Order("launch", 4))
    assert isinstance(outcome, OrdersFailed)
    assert not outcome.retry


def test_a_replaced_rank_leaves_before_it_is_launched_again() -> None:
    request, leave, launch = asks("replace", 1), Order("remove", 1), Order("launch", 1)
    assert step(request, standing()) == leave
    out = with_rank(standing(), 1, status="down", is_in=False, wanted=False)
    assert step(request, out, leave) == launch
    assert isinstance(step(request, with_rank(out, 1, status="starting", wanted=True), leave, launch), OrdersWait)
    assert isinstance(step(request, with_rank(standing(), 1, incarnation=1), leave, launch), OrdersDone)


def test_a_killed_rank_is_done_when_its_next_life_is_in() -> None:
    request, order = asks("kill", 1), Order("kill", 1)
    assert step(request, standing()) == order
    assert isinstance(step(request, standing(), order), OrdersWait), "its old life is still in"
    assert isinstance(step(request, with_rank(standing(), 1, status="down", is_in=False), order), OrdersFailed)
    assert isinstance(step(request, with_rank(standing(), 1, incarnation=1), order), OrdersDone)


def test_a_server_grows_by_its_lowest_free_ranks() -> None:
    request = asks("scale", ranks=6)
    assert step(request, standing()) == Order("launch", 4)
    grown = with_rank(standing(), 4, status="starting", wanted=True)
    assert step(request, grown, Order("launch", 4)) == Order("launch", 5)
    both = with_rank(grown, 5, status="starting", wanted=True)
    assert isinstance(step(request, both, Order("launch", 4), Order("launch", 5)), OrdersWait)
    assert isinstance(step(request, standing(serve=6), Order("launch", 4), Order("launch", 5)), OrdersDone)


def test_a_server_shrinks_one_rank_at_a_time_by_those_that_can_go_without_a_repair() -> None:
    request, six = asks("scale", ranks=4), standing(serve=6)
    assert step(request, six) == Order("remove", 5)
    assert step(request, replace(six, safe=(0, 2))) == Order("remove", 2)
    starts = with_rank(six, 3, status="starting", is_in=False)
    assert step(request, starts) == Order("remove", 3), "one that serves nothing yet goes first"
    leaving = with_rank(six, 5, status="leaving", wanted=False)
    assert isinstance(step(request, leaving, Order("remove", 5)), OrdersWait)
    five = with_rank(six, 5, status="down", is_in=False, wanted=False)
    assert step(request, five, Order("remove", 5)) == Order("remove", 4)
    assert isinstance(step(request, standing(serve=4), Order("remove", 5), Order("remove", 4)), OrdersDone)


def test_a_rank_that_is_coming_back_counts_and_is_waited_for() -> None:
    coming = with_rank(standing(), 1, status="starting", is_in=False)
    assert isinstance(step(asks("scale", ranks=4), coming), OrdersWait)


def test_a_server_is_drained_when_no_request_is_open() -> None:
    request, order = asks("drain"), Order("drain")
    assert step(request, standing(open_requests=3)) == order
    assert isinstance(step(request, standing(open_requests=3, draining=True), order), OrdersWait)
    assert isinstance(step(request, standing(draining=True), order), OrdersDone)
    assert step(asks("undrain"), standing(draining=True)) == Order("undrain")
    assert isinstance(step(asks("undrain"), standing()), OrdersDone)


@pytest.mark.parametrize(
    ("request_", "now", "retry"),
    [
        (asks("remove", 6), standing(), False),
        (asks("scale", ranks=7), standing(), False),
        (asks("scale", ranks=2), standing(), False),
        (asks("drill", 1), standing(), False),
        (asks("kill", 4), standing(), True),
        (asks("remove", 1), standing(serve=3), True),
        (asks("replace", 1), standing(serve=3), True),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is(request_: Any, now: InstanceStanding, retry: bool) -> None:
    refused = why_refused(request_, now)
    assert refused is not None
    assert refused.retry is retry
    assert why_refused(asks("scale", ranks=5), now) is None


def test_a_drill_needs_the_leave_of_the_server() -> None:
    assert why_refused(asks("drill", 1), standing(faults_allowed=True)) is None


def test_what_was_done_is_taken_back() -> None:
    half_grown = with_rank(standing(), 4, status="ready", is_in=True, wanted=True)
    assert undo(asks("scale", ranks=6), standing(), half_grown) == (Order("remove", 4),)
    half_shrunk = with_rank(standing(), 3, status="down", is_in=False, wanted=False)
    assert undo(asks("scale", ranks=3), standing(), half_shrunk) == (Order("launch", 3),)
    assert undo(asks("drain"), standing(), standing(draining=True)) == (Order("undrain"),)
    assert undo(asks("drain"), standing(draining=True), standing(draining=True)) == ()
    assert undo(asks("kill", 1), standing(), half_shrunk) == ()
