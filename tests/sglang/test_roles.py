"""A rank of the real server serves experts only, and requests again, under load and kills: every token is right."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep import cli, faults
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from tests.sglang.drills import Drilled, check_end, lives_of, scrape, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS, SHY = 4, 2
"""``SHY``: the rank that changes its role."""
ARGUMENTS = (*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", "--enable-metrics")
POINTS = [point for point in faults.PLACES if point.startswith("role.")]


@pytest.fixture(scope="module")
def drilled(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("roles")
    # Requests that take longer than that move.
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d", environment={"EEP_DRAIN_S": "0.2"})
    with server:
        yield Drilled.of(server, RANKS)
    check_end(server)


def set_role(drilled: Drilled, role: str, rank: int = SHY) -> int:
    return cli.main(["rank", "role", str(rank), role, "--dir", str(drilled.server.directory)])


def status(drilled: Drilled) -> dict[str, Any]:
    with urllib.request.urlopen(f"{drilled.server.url}/eep/status", timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def rank_of(drilled: Drilled) -> dict[str, Any]:
    found: dict[str, Any] = status(drilled)["ranks"][str(SHY)]
    return found


def serves_no_request(drilled: Drilled, story: Story) -> None:
    """While others answer, the rank has no request, and no cache, and still its experts."""
    wait_for(lambda: rank_of(drilled)["room_bytes"] > 0, "the rank to give up its cache")
    for _ in range(4):
        wait_for_answers(story.load, 2)
        told = rank_of(drilled)
        assert (told["role"], told["requests"], told["kv_room"]) == ("experts", 0, 0)
        assert told["in"]
        assert told["experts"] > 0


def test_a_rank_serves_experts_only_and_then_requests_again(drilled: Drilled) -> None:
    story = drilled.story(clients=8)
    with story.load:
        wait_for(lambda: rank_of(drilled)["requests"] > 0, "the rank to serve requests")
        before = status(drilled)
        assert set_role(drilled, "experts") == 0
        assert status(drilled)["moved_requests"] > before["moved_requests"], "a request that takes long moves"
        serves_no_request(drilled, story)
        assert scrape(drilled.server)[f'eep_rank_serves_requests{{rank="{SHY}"}}'] == 0
        assert status(drilled)["epoch"] == before["epoch"], "no view changes for it"
        life = lives_of(story, SHY, 0)
        story.kill(SHY)
        assert story.wait_until_back(RANKS, {SHY: life[SHY]}), drilled.server.log[-3000:]
        serves_no_request(drilled, story)  # its next life has the role, too
        story.kill(0)
        assert story.wait_until_back(RANKS, {0: life[0]}), drilled.server.log[-3000:]
        serves_no_request(drilled, story)  # a loss of another rank brings it no request
        assert set_role(drilled, "both") == 0
        wait_for(lambda: rank_of(drilled)["requests"] > 0, "the rank to serve requests again")
        assert rank_of(drilled)["room_bytes"] == 0
    drilled.check(story)


def test_the_last_rank_that_serves_requests_keeps_its_role(drilled: Drilled, capsys: Any) -> None:
    story = drilled.story(clients=4)
    with story.load:
        assert [set_role(drilled, "experts", rank) for rank in (1, 2, 3)] == [0, 0, 0]
        assert set_role(drilled, "experts", 0) == 3
        assert "rank 0 cannot serve experts only: no other rank that serves requests is in" in capsys.readouterr().out
        told = status(drilled)["ranks"]
        assert [told[str(rank)]["role"] for rank in range(RANKS)] == ["both", "experts", "experts", "experts"]
        wait_for_answers(story.load, 4)
        assert [set_role(drilled, "both", rank) for rank in (1, 2, 3)] == [0, 0, 0]
    drilled.check(story)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("role", ["experts", "both"])
def test_a_rank_is_killed_while_its_role_changes(drilled: Drilled, role: str, point: str) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load, 2)
        if role == "both":
            assert set_role(drilled, "experts") == 0
            wait_for(lambda: rank_of(drilled)["room_bytes"] > 0, "the rank to give up its cache")
        life = lives_of(story, SHY)
        story.target.arm(SHY, point, "kill")
        assert set_role(drilled, role) == 0
        assert story.target.wait_until_fired(SHY, point, 240.0), f"never passed: {point}"
        assert story.wait_until_back(RANKS, life), drilled.server.log[-3000:]
        if role == "experts":
            serves_no_request(drilled, story)
            assert set_role(drilled, "both") == 0
        wait_for(lambda: rank_of(drilled)["requests"] > 0, "the rank to serve requests again")
    drilled.check(story)
    assert story.target.armed() == []


def test_all_ranks_that_serve_requests_are_lost_and_come_back(drilled: Drilled) -> None:
    """Those that serve experts only stay: requests wait, and go on."""
    story = drilled.story()
    with story.load:
        assert [set_role(drilled, "experts", rank) for rank in (1, 2, 3)] == [0, 0, 0]
        wait_for_answers(story.load, 2)
        life = lives_of(story, 0)
        story.kill(0)
        assert story.wait_until_back(RANKS, life), drilled.server.log[-3000:]
        wait_for_answers(story.load, 4)
        assert [set_role(drilled, "both", rank) for rank in (1, 2, 3)] == [0, 0, 0]
    drilled.check(story)
