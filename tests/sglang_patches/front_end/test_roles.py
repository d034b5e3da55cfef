"""Ranks that serve experts only get no requests, and those that they have end or move."""

from __future__ import annotations

from collections.abc import Callable

from tests.sglang_patches.front_end.front_end_server import AbortReq, Server


class Timers:
    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def pass_by(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def served(*rids: str) -> tuple[Server, Timers]:
    """Two ranks, which have these requests in turn."""
    timers = Timers()
    server = Server(later=timers.later)
    server.view(1, r0=0, r1=0)
    for rid in rids:
        server.accept(rid)
    return server, timers


def sent_to(server: Server) -> list[tuple[str, int]]:
    return [(each.rid, each.routed_dp_rank) for each in server.sent if hasattr(each, "routed_dp_rank")]


def test_new_requests_go_to_the_others_and_come_back_with_the_role() -> None:
    server, _ = served("a", "b")
    server.front_end.set_role(0, "experts")
    assert server.sent[-1] == ("ROLE", 0, "experts")
    server.accept("c", routed_dp_rank=0)
    assert sent_to(server)[-1] == ("c", 1), "not even if the client names it"
    server.front_end.set_role(0, "both")
    server.accept("d")
    assert server.sent[-2] == ("ROLE", 0, "both"), "it hears so before it gets a request"
    assert sent_to(server)[-1] == ("d", 0)


def test_what_it_serves_may_end_and_moves_after_a_while() -> None:
    server, timers = served("a", "b", "aa")
    server.deliver("a", [1], "x", 1)
    server.front_end.set_role(0, "experts")
    assert server.deliver("aa", [7], "y", 1, finished=True).rids == ["aa"], "it may end"
    timers.pass_by()
    assert ("MOVE", "a") in server.sent
    assert sent_to(server)[-1] == ("a~1", 1)
    assert server.dropped == [], "a rank would stop all requests whose ids begin alike"
    assert server.deliver("a", [2], "xz", 2).rids == ["LATE"]
    assert server.deliver("a~1", [2], "xz", 2, finished=True).output_ids == [[2]]


def test_a_request_that_cannot_move_ends_where_it_is() -> None:
    server, timers = served()
    server.accept("a", session_params=object())
    server.front_end.set_role(0, "experts")
    timers.pass_by()
    assert server.answered == []
    assert server.deliver("a", [1], "x", 1, finished=True).rids == ["a"]


def test_one_that_its_client_has_aborted_is_answered_by_its_rank() -> None:
    server, timers = served("a")
    server.front_end.send(AbortReq("a"))
    server.front_end.set_role(0, "experts")
    timers.pass_by()
    assert server.front_end.abort_answer(AbortReq("a"))


def test_nothing_moves_from_a_rank_that_serves_requests_again_by_then() -> None:
    server, timers = served("a")
    server.front_end.set_role(0, "experts")
    server.front_end.set_role(0, "both")
    timers.pass_by()
    assert server.front_end.ledger.moved == 0


def test_its_next_life_is_told_and_gets_no_request_either() -> None:
    server, _ = served()
    server.front_end.set_role(0, "experts")
    server.front_end.on_gone(0, 0)
    server.view(2, r1=0)
    del server.sent[:]
    server.view(3, r0=1, r1=0)
    assert server.sent == [("ROLE", 0, "experts")]
    server.accept("a")
    assert sent_to(server) == [("a", 1)]


def test_requests_wait_while_only_ranks_without_requests_are_in() -> None:
    server, _ = served("a", "b")
    server.front_end.set_role(0, "experts")
    server.front_end.on_gone(1, 0)
    server.view(2, r0=0)
    assert server.front_end.ledger.waiting() == ["b"]
    server.view(3, r0=0, r1=1)
    assert sent_to(server)[-1] == ("b~1", 1)
