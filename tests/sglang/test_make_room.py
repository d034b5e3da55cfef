"""A server that loses one, two and three of its four ranks goes on without a mask: those that are left make room for experts.

Every token is right throughout, and when ranks are back the room goes back to the KV caches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep import cli, faults
from eep.drill.load import Load
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from tests.sglang.drills import Drilled, scrape, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS = 4
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", "--enable-metrics"),
    *("--eep-on-lost-coverage", "make-room", "--eep-redundant-experts", "0"),
)
"""Without redundant slots each loss needs room."""
POINTS = [point for point in faults.PLACES if point.startswith("room.")]


@pytest.fixture(scope="module")
def drilled(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("room")
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d")
    with server:
        yield Drilled.of(server, RANKS)
    assert server.leftovers() == []


@pytest.fixture(scope="module")
def full(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    """A server with caches that are hardly large enough."""
    place = tmp_path_factory.mktemp("full")
    server = Server(model, (*ARGUMENTS, "--max-total-tokens", "4700"), place / "log", directory=place / "d")
    with server:
        yield Drilled.of(server, RANKS, tokens=100)
    assert server.leftovers() == []


def order(drilled: Drilled, action: str, rank: int) -> None:
    assert cli.main(["rank", action, str(rank), "--dir", str(drilled.server.directory)]) == 0


def room(drilled: Drilled) -> dict[int, float]:
    """Bytes of its cache that each rank has given, where it has ever given any."""
    named = "eep_room_bytes{"
    found = {name: value for name, value in scrape(drilled.server).items() if name.startswith(named)}
    return {int(name.split('rank="')[1].split('"')[0]): value for name, value in found.items()}


def test_one_two_and_three_of_four_ranks_are_lost_and_come_back(drilled: Drilled) -> None:
    story = drilled.story()
    given = []
    with story.load:
        wait_for_answers(story.load, 4)
        left = list(range(RANKS))
        for rank in (1, 2, 3):
            order(drilled, "remove", rank)
            left.remove(rank)
            assert story.wait_until_run(left), drilled.server.log[-3000:]
            wait_for_answers(story.load, 6)
            given.append(room(drilled)[0])
        for rank in (2, 1, 3):
            order(drilled, "launch", rank)
            left.append(rank)
            assert story.wait_until_run(sorted(left)), drilled.server.log[-3000:]
            wait_for_answers(story.load, 6)
            given.append(room(drilled)[0])
    drilled.check(story)
    assert "masked" not in drilled.server.log
    assert 0 < given[0] < given[1] < given[2], "the fewer there are, the more room each makes"
    assert given[2] > given[3] > given[4] > given[5] == 0, "and gives it back"


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_it_makes_room_or_gives_it_back(drilled: Drilled, point: str) -> None:
    story = drilled.story()
    before = story.target.ranks()[2].incarnation
    story.target.arm(2, point, "kill")
    with story.load:
        story.kill(1)
        assert story.target.wait_until_fired(2, point, 240.0), f"never passed: {point}"
        wait_for(lambda: story.target.ranks()[2].incarnation > before, "the rank to be back")
        wait_for_answers(story.load, 6)
    drilled.check(story)
    assert story.target.armed() == []


def test_requests_use_the_part_of_the_cache_that_has_to_go(full: Drilled) -> None:
    """Half of the cache goes while more requests than the other half has room for are on one rank."""
    assert full.server.directory is not None
    load = Load(full.server.url, full.prompts, full.wanted, clients=40, ranks=1)
    story = Story(full.server.directory, load)
    with load:
        wait_for_answers(load, 40)
        for rank in (1, 2, 3):
            order(full, "remove", rank)
        assert story.wait_until_run((0,)), full.server.log[-3000:]
        wait_for_answers(load, 60)
        for rank in (1, 2, 3):
            order(full, "launch", rank)
        assert story.wait_until_all_run(RANKS), full.server.log[-3000:]
        wait_for_answers(load, 20)
    full.check(story)
    owed = [int(each) for each in re.findall(r"slots; (\d+) of them are still in use", full.server.log)]
    assert max(owed) > 0, "requests had tokens there"
    assert room(full)[0] == 0
