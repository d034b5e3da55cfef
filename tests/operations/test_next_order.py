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
from tests.operations.instance import SERVES, asks, standing, with_rank


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
    assert isinstance(step(request, standing(open_requests=3), order), OrdersFailed), "another operator has ended it"
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
    assert undo(asks("scale", ranks=6), standing(), half_grown, {4, 5}) == (Order("remove", 4),)
    assert undo(asks("scale", ranks=6), standing(), half_grown, {5}) == (), "another operator has launched it"
    half_shrunk = with_rank(standing(), 3, status="down", is_in=False, wanted=False)
    assert undo(asks("scale", ranks=3), standing(), half_shrunk, {3}) == (Order("launch", 3),)
    assert undo(asks("drain"), standing(), standing(draining=True), ()) == (Order("undrain"),)
    assert undo(asks("drain"), standing(draining=True), standing(draining=True), ()) == ()
    assert undo(asks("kill", 1), standing(), half_shrunk, {1}) == ()


def roles(now: InstanceStanding, **named: str) -> InstanceStanding:
    for name, role in named.items():
        now = with_rank(now, int(name[1:]), role=role)
    return now


def test_a_rank_serves_experts_only_when_its_last_request_is_gone() -> None:
    request, order = asks("role", 2, role="experts"), Order("experts", 2)
    assert step(request, standing()) == order
    told = roles(standing(), r2="experts")
    assert step(request, with_rank(told, 2, requests=3), order) == OrdersWait("rank 2 still serves 3 requests")
    assert step(request, told, order) == OrdersDone("rank 2 serves experts only")
    assert isinstance(step(request, told), OrdersDone), "it does already"
    assert isinstance(step(request, standing(), order), OrdersFailed), "another operator has changed it back"


def test_a_rank_serves_requests_again_at_once() -> None:
    request, now = asks("role", 2, role="both"), roles(standing(), r2="experts")
    assert step(request, now) == Order("both", 2)
    assert isinstance(step(request, standing(), Order("both", 2)), OrdersDone)


def test_a_role_that_was_not_reached_in_time_is_taken_back() -> None:
    request = asks("role", 2, role="experts")
    experts = roles(standing(), r2="experts")
    assert undo(request, standing(), experts, {2}) == (Order("both", 2),)
    assert undo(request, standing(), standing(), {2}) == ()
    assert undo(request, experts, standing(), {2}) == (), "another operator has changed it back"


@pytest.mark.parametrize("action", ["role", "remove", "replace"])
def test_the_last_rank_that_serves_requests_stays_as_it_is(action: str) -> None:
    request = asks(action, 0, role="experts" if action == "role" else None)
    last = roles(standing(), r1="experts", r2="experts", r3="experts")
    assert isinstance(why_refused(request, last), OrdersFailed)
    leaving = with_rank(roles(standing(), r1="experts", r2="experts"), 3, status="leaving", wanted=False)
    assert isinstance(why_refused(request, leaving), OrdersFailed), "the other one leaves"
    starting = with_rank(roles(standing(), r1="experts", r2="experts"), 3, status="starting", is_in=False)
    assert isinstance(why_refused(request, starting), OrdersFailed), "the other one is not back yet"
    assert why_refused(request, roles(standing(), r1="experts", r2="experts")) is None


def test_a_rank_without_requests_may_go_while_those_with_requests_are_on_their_way_back() -> None:
    now = with_rank(roles(standing(5), r1="experts", r2="experts", r3="experts", r4="experts"), 0, is_in=False)
    assert why_refused(asks("remove", 2), now) is None


def test_a_server_shrinks_by_ranks_other_than_the_last_that_serves_requests() -> None:
    now = roles(standing(), r0="experts", r1="experts", r2="experts")
    assert step(asks("scale", ranks=3), now) == Order("remove", 2)


def of_two_hosts(elsewhere: int = 2) -> InstanceStanding:
    """A host with ranks 2 and 3 of an instance that needs three ranks, with ``elsewhere`` in on the other host."""
    return replace(standing(), ranks={2: SERVES, 3: SERVES}, elsewhere=elsewhere)


def test_a_host_may_give_up_ranks_that_those_of_other_hosts_make_up_for() -> None:
    for request in (asks("remove", 3), asks("replace", 3), asks("scale", ranks=1)):
        assert why_refused(request, of_two_hosts()) is None
        refused = why_refused(request, of_two_hosts(elsewhere=1))
        assert refused is not None
        assert "of this host" in refused.reason
    last = with_rank(of_two_hosts(elsewhere=9), 3, status="down", is_in=False, wanted=False)
    assert isinstance(why_refused(asks("remove", 2), last), OrdersFailed), "requests here need a rank of this host"


@pytest.mark.parametrize("action", ["remove", "launch", "replace", "kill", "role"])
def test_the_ranks_of_other_hosts_are_for_their_own_servers_to_change(action: str) -> None:
    refused = why_refused(asks(action, 0, role="experts" if action == "role" else None), of_two_hosts())
    assert refused is not None
    assert refused.reason == "rank 0 is not of this host, which has ranks [2, 3]; ask the server of its host"


def test_who_asks_for_too_many_ranks_is_told_what_to_do_for_more() -> None:
    refused = why_refused(asks("scale", ranks=7), standing())
    assert refused is not None
    assert refused.reason == "there is room for 6 ranks; for more start the server with a larger --eep-max-ranks"


def test_a_host_has_no_more_ranks_than_it_was_started_for() -> None:
    refused = why_refused(asks("scale", ranks=4), of_two_hosts())
    assert refused is not None
    assert "this host has room for 2 ranks" in refused.reason


def test_the_ranks_of_other_hosts_are_counted_from_the_status() -> None:
    rank = {"status": "ready", "incarnation": 0, "in": True, "failures": 0}
    status = {"phase": "RUN", "ranks": {"2": rank}, "links": {}, "other_hosts": {"node-0": [0, 1], "node-2": [4]}}
    assert InstanceStanding.of(status).elsewhere == 3
    assert InstanceStanding.of({**status, "links": None}).elsewhere is None


def test_ranks_that_are_not_in_are_kept_too_and_not_all_of_them_can_be_removed() -> None:
    forming = standing(serve=0, phase="FORMING")
    for rank in range(4):
        forming = with_rank(forming, rank, status="starting", wanted=True)
    assert why_refused(asks("remove", 3), forming) is None
    three = with_rank(forming, 3, status="down", wanted=False)
    refused = why_refused(asks("remove", 2), three)
    assert refused is not None
    assert "2 ranks would serve or come back, and it takes 3" in refused.reason
    assert why_refused(asks("remove", 3), three) is None, "it is out already"
    one = replace(with_rank(with_rank(three, 2, status="down"), 1, status="down"), fewest_ranks=0)
    assert isinstance(why_refused(asks("remove", 0), one), OrdersFailed), "the last one stays in any case"


@pytest.mark.parametrize("status", ["leaving", "fencing", "ending"])
def test_a_rank_that_ends_is_launched_when_it_has_ended(status: str) -> None:
    ending = with_rank(standing(), 3, status=status, is_in=False, wanted=False)
    assert step(asks("launch", 3), ending) == OrdersWait(f"rank 3 is {status}")
    assert step(asks("launch", 3), with_rank(ending, 3, status="down")) == Order("launch", 3)
