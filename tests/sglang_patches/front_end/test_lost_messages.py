"""Messages that reach another life of a rank, or none."""

from __future__ import annotations

from collections.abc import Callable

from sglang_patches.addressed_life import RECEIVED, life_of
from tests.sglang_patches.front_end.front_end_server import AbortReq, Server


def test_a_message_names_the_life_that_it_is_for() -> None:
    server = Server()
    server.view(1, r0=3)
    server.accept("a")
    server.front_end.on_gone(0, 3)
    server.view(3, r0=4)
    assert [(message.rid, life_of(message)) for message in server.sent] == [("a", 3), ("a~1", 4)]


def test_a_receipt_is_no_abort() -> None:
    server = Server()
    server.view(1, r0=0)
    server.accept("a")
    assert not server.front_end.abort_answer(AbortReq("a", abort_message=RECEIVED)), "SGLang would end the request"
    assert "a" in server.front_end.ledger
    assert not server.front_end.ledger.has_unreceived


def test_a_request_that_did_not_reach_its_rank_is_revoked_and_sent_again() -> None:
    calls: list[Callable[[], None]] = []
    server = Server(later=lambda seconds, call: calls.append(call), receipt_limit=60.0)
    server.view(1, r0=0, r1=0)
    server.accept("lost")
    server.accept("received")
    server.front_end.abort_answer(AbortReq("received", abort_message=RECEIVED))
    server.now = 61.0
    calls.pop()()
    assert server.revoked == ["lost"]
    assert [message.rid for message in server.sent] == ["lost", "received", "lost~1"]
    assert server.deliver("lost", [1], "a", 1, finished=True).rids == ["LATE"], (
        "it was slow, not lost; no client sees it"
    )
    assert server.deliver("lost~1", [1], "a", 1, finished=True).rids == ["lost"]
    assert server.answered == []


def test_nothing_is_looked_after_when_all_was_received() -> None:
    calls: list[Callable[[], None]] = []
    server = Server(later=lambda seconds, call: calls.append(call))
    server.view(1, r0=0)
    server.accept("a")
    server.front_end.abort_answer(AbortReq("a", abort_message=RECEIVED))
    calls.pop()()
    assert calls == []
