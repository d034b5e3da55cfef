"""A server that loses one, two and three of its four ranks goes on without a mask: those that are left make room for experts.

Every token is right throughout, and when ranks are back the room goes back to the KV caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled
from tests.sglang.roomy_server import MAKING_ROOM, POINTS, RANKS, Roomy

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
ARGUMENTS = (*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", "--enable-metrics", *MAKING_ROOM)


@pytest.fixture(scope="module")
def roomy(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roomy]:
    place = tmp_path_factory.mktemp("room")
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d")
    with server:
        yield Roomy(Drilled.of(server, RANKS))
    assert server.leftovers() == []


@pytest.fixture(scope="module")
def full(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roomy]:
    """A server with caches that are hardly large enough."""
    place = tmp_path_factory.mktemp("full")
    server = Server(model, (*ARGUMENTS, "--max-total-tokens", "4700"), place / "log", directory=place / "d")
    with server:
        yield Roomy(Drilled.of(server, RANKS, tokens=100))
    assert server.leftovers() == []


def test_one_two_and_three_of_four_ranks_are_lost_and_come_back(roomy: Roomy) -> None:
    roomy.check_that_three_of_four_may_go()


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_it_makes_room_or_gives_it_back(roomy: Roomy, point: str) -> None:
    roomy.check_a_kill(point)


def test_requests_use_the_part_of_the_cache_that_has_to_go(full: Roomy) -> None:
    full.check_that_used_rows_go()
