"""What a rank makes of the orders about its role and its requests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.addressed_life import MOVED_AWAY, REVOKED, ROLE
from sglang_patches.rank import role
from sglang_patches.rank.role import RankRole, stoppable, take_orders


def order(rid: str, text: str | None) -> Any:
    return SimpleNamespace(rid=rid, abort_message=text)


def test_orders_for_this_rank_are_taken_out_and_all_else_stays() -> None:
    request, abort, revoked = SimpleNamespace(rid="r"), order("x", None), order("y", REVOKED)
    messages = [
        order("2", f"{ROLE}experts"),
        request,
        order("a", MOVED_AWAY),
        abort,
        order("1", f"{ROLE}both"),
        revoked,
    ]
    assert take_orders(messages, 2) == ("experts", ["a"])
    assert messages == [request, abort, revoked]
    assert take_orders([order("1", f"{ROLE}both"), order("1", f"{ROLE}experts")], 1) == ("experts", [])
    assert take_orders([order("1", f"{ROLE}both")], 3) == (None, [])


def test_no_other_request_is_stopped_whose_id_begins_alike() -> None:
    assert stoppable({"a", "b", "c"}, {"a", "ab", "b", "b~1"}) == []
    assert sorted(stoppable({"a", "ab"}, {"a", "ab"})) == ["a", "ab"], "both go"
    assert stoppable({"a~1"}, {"a", "a~1"}) == ["a~1"]


@given(st.sets(st.text("ab~", max_size=3)), st.sets(st.text("ab~", max_size=3)))
def test_what_is_stopped_goes_on_elsewhere(moved: set[str], served: set[str]) -> None:
    stopped = stoppable(moved, served)
    hit = {wire for wire in served for each in stopped if wire.startswith(each)}
    assert hit <= moved


class Room:
    def __init__(self) -> None:
        self.asked: list[bool] = []


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    made = Room()
    monkeypatch.setattr(role.cache_room, "leave_to_experts", made.asked.append)
    return made


def scheduler(*waiting: str, running: tuple[str, ...] = (), chunked: str | None = None) -> Any:
    def requests(rids: Any) -> list[Any]:
        return [SimpleNamespace(rid=rid) for rid in rids]

    return SimpleNamespace(
        running_batch=SimpleNamespace(reqs=requests(running)),
        last_batch=None,
        waiting_queue=requests(waiting),
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        chunked_req=None if chunked is None else SimpleNamespace(rid=chunked),
    )


def test_the_cache_goes_with_the_last_request_and_is_back_at_once(room: Room) -> None:
    rank = RankRole()
    rank.look(scheduler())
    rank.hear("experts")
    for busy in (scheduler("a"), scheduler(running=("a",)), scheduler(chunked="a")):
        rank.look(busy)
    assert room.asked == []
    rank.look(scheduler())
    rank.look(scheduler())
    rank.hear("experts")
    assert room.asked == [True]
    rank.hear("both")
    rank.hear("both")
    assert room.asked == [True, False]


def test_a_role_that_ends_before_the_last_request_takes_no_cache(room: Room) -> None:
    rank = RankRole()
    rank.hear("experts")
    rank.look(scheduler("a"))
    rank.hear("both")
    rank.look(scheduler())
    assert room.asked == []
