"""Requests that cannot be served, or that do harm: their client gets an error, and other requests go on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from eep.requests.blame import MOST_FRUITLESS_MOVES
from tests.sglang_patches.front_end.front_end_server import (
    UNSENDABLE,
    AbortReq,
    BatchTokenizedGenerateReqInput,
    Parameters,
    Server,
    TokenizedGenerateReqInput,
)


def test_one_that_cannot_be_sent_is_an_error_to_its_client_and_no_hindrance_to_others() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    with pytest.raises(OverflowError):
        server.accept("bad", sampling_params=Parameters(top_k=UNSENDABLE))
    bad = TokenizedGenerateReqInput("bad in a batch", sampling_params=Parameters(top_k=UNSENDABLE))
    with pytest.raises(OverflowError):
        server.front_end.send(BatchTokenizedGenerateReqInput([TokenizedGenerateReqInput("beside it"), bad]))
    assert len(server.front_end.ledger) == 0
    assert server.dropped == ["beside it"], "its client does not wait for it any more"
    assert server.answered == [], "SGLang answers for an error that it is raised"
    server.accept("good")
    assert server.front_end.ledger.loads.requests() == {0: 1}


def test_one_that_waited_and_then_cannot_be_sent_is_answered_and_the_others_are_sent() -> None:
    server = Server()
    server.accept("bad", sampling_params=Parameters(top_k=UNSENDABLE))
    server.accept("good")
    server.view(1, r0=0)
    assert [message.rid for message in server.sent] == ["good"]
    ((name, reason),) = server.answered
    assert name == "bad"
    assert reason["status_code"] == 500
    assert "more than 64 bits" in reason["message"]
    assert list(server.front_end._kept) == ["good"]


def test_a_parameter_of_the_wrong_type_is_refused_before_anything_is_sent() -> None:
    class SamplingParams(msgspec.Struct, kw_only=True, array_like=True):
        max_new_tokens: int | None = 8
        json_schema: str | None = None
        top_k: int = 1
        temperature: float = 1.0
        custom_params: dict[str, str] | None = None
        n: int = 1

    server = Server()
    server.view(1, r0=0)
    for wrong in ({"max_new_tokens": 16.0}, {"json_schema": {"type": "object"}}, {"top_k": 10**25}):
        parameters: Any = SamplingParams(**wrong)
        with pytest.raises(ValueError, match="sampling_params: "):
            server.accept("bad", sampling_params=parameters)
    parameters = SamplingParams(max_new_tokens=16.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at `max_new_tokens`"):
        server.accept("bad", sampling_params=parameters)
    assert (server.sent, len(server.front_end.ledger)) == ([], 0)
    parameters = SamplingParams(temperature=0, custom_params={"anything": object()})  # type: ignore[dict-item]
    server.accept("good", sampling_params=parameters)
    assert [message.rid for message in server.sent] == ["good"]


class SessionParams(msgspec.Struct, kw_only=True, array_like=True):
    id: str | None = None
    offset: int | None = None


class TokenizedStruct(msgspec.Struct, kw_only=True, array_like=True, tag=True):
    """A request in the form in which SGLang has it."""

    rid: str
    input_ids: object = None
    sampling_params: object = None
    session_params: SessionParams | None = None
    priority: int | None = None
    time_stats: object = None
    stream: bool = True
    http_worker_ipc: str | None = None


def test_a_field_of_the_wrong_type_is_refused_before_anything_is_sent() -> None:
    server = Server()
    server.view(1, r0=0)
    elsewhere: Any = "three tokens on"
    wrong = TokenizedStruct(rid="bad", sampling_params=Parameters(), session_params=SessionParams(offset=elsewhere))
    with pytest.raises(ValueError, match="got `str` - at `session_params"):
        server.front_end.send(wrong)
    with pytest.raises(ValueError, match="can't serialize ints"):
        server.front_end.send(TokenizedStruct(rid="bad", sampling_params=Parameters(), priority=2**70))
    assert (server.sent, len(server.front_end.ledger)) == ([], 0)
    server.front_end.send(TokenizedStruct(rid="good", time_stats=object(), sampling_params=Parameters()))
    assert [message.rid for message in server.sent] == ["good"]


def test_a_restart_that_goes_another_way_is_told_to_the_client_and_stopped() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.accept("a", return_hidden_states=True)
    server.deliver("a", [1, 2], "xy", 2)
    server.front_end.on_gone(0, 0)
    message = server.deliver("a~1", [1, 5, 6], "xzz", 3)
    assert message.rids == ["LATE"]
    assert server.dropped == ["a~1"]
    ((name, reason),) = server.answered
    assert (name, reason["status_code"]) == ("a", 503)
    assert "differs from what was sent to you" in reason["message"]
    assert len(server.front_end.ledger) == 0


def test_a_request_that_ends_rank_after_rank_is_ended_itself() -> None:
    server = Server()
    for life in range(MOST_FRUITLESS_MOVES + 1):
        server.view(life + 1, r0=life)
        if life == 0:
            server.accept("bad")
        server.front_end.on_gone(0, life)
    ((name, reason),) = server.answered
    assert (name, reason["status_code"]) == ("bad", 500)
    assert "may be what ends ranks" in reason["message"]
    assert len(server.sent) == MOST_FRUITLESS_MOVES + 1


def test_a_request_with_which_two_ranks_fail_is_ended_and_what_waited_for_it_goes_on() -> None:
    server = Server()
    server.view(1, r0=0)
    server.accept("bad")
    server.accept("good")
    server.front_end.on_gone(0, 0, failed=True)
    server.view(2, r0=1)
    assert [message.rid for message in server.sent[2:]] == ["bad~1"], "one at a time"
    server.front_end.on_gone(0, 1, failed=True)
    ((name, reason),) = server.answered
    assert (name, reason["status_code"]) == ("bad", 500)
    assert "an exception ended each of the last two ranks" in reason["message"]
    server.view(3, r0=2)
    assert [message.rid for message in server.sent[3:]] == ["good~1"]


def test_one_that_waits_for_a_doubted_one_is_sent_when_that_has_a_token_or_an_end() -> None:
    for ends in (False, True):
        server = Server()
        server.view(1, r0=0)
        server.accept("a")
        server.accept("b")
        server.front_end.on_gone(0, 0, failed=True)
        server.view(2, r0=1)
        if ends:
            server.front_end.abort_answer(AbortReq("a~1"))
        else:
            server.deliver("a~1", [1], "x", 1)
        assert [message.rid for message in server.sent[2:]] == ["a~1", "b~1"]
