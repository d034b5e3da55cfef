"""What a request costs the front end does not grow with the number of open requests, and that number has a bound."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.sglang_patches.front_end.front_end_server import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    Server,
    TokenizedGenerateReqInput,
)

OPEN = (10, 1000)


def count_calls(work: Callable[[], object]) -> int:
    """How many calls the interpreter makes for ``work``: a measure of work that no busy machine changes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def with_ranks(count: int) -> Server:
    server = Server()
    server.view(1, r0=0, r1=0)
    fill(server, count)
    return server


def without_ranks(count: int) -> Server:
    server = Server()
    fill(server, count)
    return server


def with_doubts(count: int) -> Server:
    """An exception ended the rank of all requests: one is on the rank that is left, and the others wait for its token."""
    server = Server()
    server.view(1, r0=0)
    fill(server, count)
    server.view(2, r0=0, r1=0)
    server.front_end.on_gone(0, 0, failed=True)
    assert len(server.front_end.ledger.waiting()) == count - 1
    return server


def fill(server: Server, count: int) -> None:
    for number in range(count):
        server.accept(f"open {number:04}")


def accept(server: Server) -> None:
    server.accept("new")


def abort(server: Server) -> None:
    server.front_end.send(AbortReq("open 0007"))


def give_token(server: Server) -> None:
    server.deliver(server.sent[-1].rid, [1], "a", 1)


def give_nothing(server: Server) -> None:
    server.deliver(server.sent[-1].rid, [], "", 0)


@pytest.mark.parametrize(
    ("start", "work"),
    [
        (with_ranks, accept),
        (with_ranks, abort),
        (with_ranks, give_token),
        (without_ranks, accept),
        (without_ranks, abort),
        (with_doubts, accept),
        (with_doubts, give_token),
        (with_doubts, give_nothing),
    ],
)
def test_a_request_costs_the_same_however_many_are_open(
    start: Callable[[int], Server], work: Callable[[Server], None]
) -> None:
    few, many = (start(count) for count in OPEN)
    assert count_calls(lambda: work(many)) <= count_calls(lambda: work(few)) + 20


def test_a_prompt_is_not_copied() -> None:
    server = Server()
    server.view(1, r0=0)
    message = TokenizedGenerateReqInput("a", array("q", range(1000, 33768)))
    tracemalloc.start()
    server.front_end.send(message)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 32768


def test_an_abort_ends_the_request_that_it_names_and_no_other_that_waits() -> None:
    server = Server()
    server.accept("a")
    server.accept("ab")
    server.front_end.send(AbortReq("a"))
    assert server.answered == [("a", None)]
    server.front_end.send(AbortReq("", abort_all=True))
    assert server.answered == [("a", None), ("ab", None)]


def test_an_abort_of_the_id_of_a_batch_ends_all_of_it() -> None:
    """SGLang calls the requests of a batch "b" "b_0", "b_1" and so on."""
    server = Server()
    for name in ("b_0", "b_1", "c"):
        server.accept(name)
    server.front_end.send(AbortReq("b"))
    assert server.answered == [("b_0", None), ("b_1", None)]


def bounded(most_open: int) -> tuple[Server, list[Callable[[], None]]]:
    calls: list[Callable[[], None]] = []

    def later(seconds: float, call: Callable[[], None]) -> None:
        if seconds == 0:
            calls.append(call)

    server = Server(later=later, most_open=lambda ranks: most_open)
    server.view(1, r0=0, r1=0)
    return server, calls


def test_a_request_beyond_the_bound_is_told_to_try_again_after_its_client_waits_for_it() -> None:
    server, calls = bounded(2)
    for name in "abc":
        server.accept(name)
    assert [message.rid for message in server.sent] == ["a", "b"]
    assert server.answered == []
    calls.pop()()
    ((name, reason),) = server.answered
    assert (name, reason["status_code"]) == ("c", 503)
    assert "try again" in reason["message"]
    server.deliver("a", [1], "x", 1, finished=True)
    server.accept("d")
    assert server.sent[-1].rid == "d"


def test_a_batch_is_within_the_bound_as_a_whole_or_refused_as_a_whole() -> None:
    server, calls = bounded(2)
    server.accept("a")
    server.front_end.send(BatchTokenizedGenerateReqInput([TokenizedGenerateReqInput(rid) for rid in "bc"]))
    for call in calls:
        call()
    assert [name for name, _ in server.answered] == ["b", "c"]
    assert [message.rid for message in server.sent] == ["a"]


def test_the_requests_of_a_lost_rank_are_not_refused() -> None:
    server, _ = bounded(2)
    server.accept("a")
    server.accept("b")
    server.front_end.on_gone(0, 0)
    assert [message.rid for message in server.sent] == ["a", "b", "a~1"]
    assert server.answered == []


def test_a_health_check_is_never_refused() -> None:
    server = Server(health_checks=("HEALTH_CHECK",), most_open=lambda ranks: 0)
    server.view(1, r0=0)
    server.accept("HEALTH_CHECK_1")
    assert [message.rid for message in server.sent] == ["HEALTH_CHECK_1"]


def test_the_bound_may_grow_with_the_number_of_ranks() -> None:
    asked: list[Any] = []
    server = Server(most_open=lambda ranks: asked.append(ranks) or 1)  # type: ignore[func-returns-value]
    server.accept("a")
    server.view(1, r0=0, r1=0)
    server.deliver("a", [1], "x", 1, finished=True)
    server.accept("b")
    assert asked == [0, 2]
