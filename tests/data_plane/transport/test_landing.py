"""The landing of a rank on a GPU, with a context that only notes what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

import eep
from eep.abi import native
from eep.abi.context import NativeContext
from eep.data_plane.transport.landing import Landing

SIZE = 1 << 20


class NotedContext:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def span_hosts(self, landing: int, remote: int) -> None:
        self.told.append(("span", landing, remote))

    def show_mirror(self, mirror: int, own_incarnation: int) -> None:
        self.told.append(("show", mirror, own_incarnation))

    def hide_mirror(self, mirror: int) -> None:
        self.told.append(("hide", mirror))


@pytest.fixture
def landing() -> Iterator[Landing]:
    landing = Landing(SIZE)
    yield landing
    landing.close()


def serve(landing: Landing, channels: int, elsewhere: set[int]) -> NotedContext:
    context = NotedContext()
    landing.serve(cast(NativeContext, context), native.Shape(max_ranks=4, channels=channels, lanes=1), elsewhere)
    return context


def test_tokens_have_room_for_ranks_that_are_elsewhere_now(landing: Landing) -> None:
    assert serve(landing, 1, {2, 3}).told == [("span", landing.memory.address, 0b1100)]
    landing.check(2)
    with pytest.raises(eep.PeerUnreachable, match="rank 1 was on this host when this rank began"):
        landing.check(1)


def test_lanes_are_the_same_for_all_ranks(landing: Landing) -> None:
    assert serve(landing, 0, set()).told == [("span", landing.memory.address, 0b1111)]
    landing.check(1)


def test_mirrors_are_shown_and_hidden_while_the_context_is_there(landing: Landing) -> None:
    landing.show(4096, 1)
    context = serve(landing, 1, {2})
    landing.show(8192, 3)
    landing.hide(8192)
    assert context.told[1:] == [("show", 8192, 3), ("hide", 8192)]


def test_a_context_on_a_cpu_needs_no_landing(tmp_path: Any) -> None:
    shape = {"max_ranks": 2, "max_tokens": 4, "hidden": 64, "topk": 1, "local_experts": 1}
    buffer = eep.Buffer(0, rendezvous=str(tmp_path), **shape)  # type: ignore[arg-type]
    with buffer, pytest.raises(ValueError, match="a rank on a CPU needs no landing"):
        buffer.context.span_hosts(buffer.region.address, 2)
