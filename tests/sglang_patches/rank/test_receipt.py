"""Which messages a life of a rank takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eep import faults
from sglang_patches import addressed_life
from sglang_patches.addressed_life import REVOKED
from sglang_patches.rank.receipt import sort_out


def request(rid: str, life: int) -> Any:
    message = SimpleNamespace(rid=rid)
    addressed_life.address(message, life)
    return message


def revocation(rid: str) -> Any:
    return SimpleNamespace(rid=rid, abort_message=REVOKED)


def test_a_request_for_the_life_before_is_dropped() -> None:
    messages = [request("old", 0), request("new", 1)]
    assert sort_out(messages, 1) == ["new"]
    assert [message.rid for message in messages] == ["new"]
    assert messages[0].http_worker_ipc is None, "SGLang takes it for the address of a tokenizer process"


def test_a_revoked_request_is_dropped_and_no_other_whose_id_begins_alike() -> None:
    messages = [request("a", 0), request("ab", 0), revocation("a"), request("a~1", 0)]
    assert sort_out(messages, 0) == ["ab", "a~1"]
    assert [message.rid for message in messages] == ["ab", "a~1"]


def test_a_message_for_no_life_is_for_all_and_is_not_acknowledged() -> None:
    abort, check = SimpleNamespace(rid="a", abort_message=None), SimpleNamespace(rid="check", http_worker_ipc="ipc://x")
    messages: list[Any] = [abort, check]
    assert sort_out(messages, 3) == []
    assert messages == [abort, check]
    assert check.http_worker_ipc == "ipc://x"


def test_a_request_that_is_lost_is_neither_begun_nor_acknowledged() -> None:
    faults.arm("request.received", "drop")
    messages = [request("lost", 0), request("next", 0)]
    assert sort_out(messages, 0) == ["next"]
    assert [message.rid for message in messages] == ["next"]


@given(st.lists(st.tuples(st.text(max_size=2), st.integers(0, 2))), st.lists(st.text(max_size=2)), st.integers(0, 2))
def test_what_is_left_is_for_this_life_in_order_and_not_revoked(
    sent: list[tuple[str, int]], revoked: list[str], life: int
) -> None:
    messages = [*(request(rid, meant) for rid, meant in sent), *map(revocation, revoked)]
    expected = [rid for rid, meant in sent if meant == life and rid not in revoked]
    assert sort_out(messages, life) == expected
    assert [message.rid for message in messages] == expected


@given(st.text())
def test_a_field_that_a_client_has_filled_in_is_read_without_an_error(text: str) -> None:
    for given_text in (text, f"eep life {text}"):
        life = addressed_life.life_of(SimpleNamespace(http_worker_ipc=given_text))
        assert life is None or life >= 0
