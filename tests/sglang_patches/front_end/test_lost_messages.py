"""Messages that reach another life of a rank, or none."""

from __future__ import annotations

from collections.abc import Callable

from sglang_patches.addressed_life import RECEIVED, life_of
from sglang_patches.replayed_fields import DELIVERED
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


def test_when_the_detokenizer_is_gone_ranks_stop_and_requests_go_on_from_what_their_clients_have() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    for name in ("a", "b", "c"):
        server.accept(name)
    server.accept("in a session", session_params={"id": "s"})
    server.deliver("a", [1, 2], "ab", 2)
    server.front_end.send(AbortReq("c"))
    server.front_end.abort_answer(AbortReq("b", abort_message=RECEIVED))
    before = len(server.sent)
    server.front_end.on_detokenizer_gone()
    assert server.revoked == ["c", "in a session"], "a rank may have the others"
    assert server.sent[before] == "RENEW", "a rank that stops all it serves must not stop what it is sent anew"
    again = {message.rid: message.sampling_params.custom_params for message in server.sent[before + 1 :]}
    assert again == {"a~1": {DELIVERED: [1, 2]}, "b~1": None}
    answers = dict(server.answered)
    assert answers.keys() == {"c", "in a session"}
    assert answers["in a session"]["status_code"] == 503
    assert server.deliver("a", [3], "c", 3).rids == ["LATE"], "the next detokenizer does not know how the text began"
    seen = server.deliver("a~1", [3], "abc", 3)
    assert (seen.rids, seen.output_ids, seen.output_strs) == (["a"], [[3]], ["c"])


def test_nothing_is_looked_after_when_all_was_received() -> None:
    calls: list[Callable[[], None]] = []
    server = Server(later=lambda seconds, call: calls.append(call))
    server.view(1, r0=0)
    server.accept("a")
    server.front_end.abort_answer(AbortReq("a", abort_message=RECEIVED))
    calls.pop()()
    assert calls == []
