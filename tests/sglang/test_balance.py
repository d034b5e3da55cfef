"""Experts move while clients stream: every token is right, also where a rank is killed while it stages and after it switched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep import cli
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from tests.sglang.drills import Drilled, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS = 4
# The prompts of a drill are few, so what they ask for is far from even.
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on"),
    *("--enable-eplb", "--eplb-rebalance-num-iterations", "40", "--eep-staged-experts", "2"),
)
POINTS = ("balance.staging", "balance.staged", "balance.agreed", "balance.written", "balance.switched")


@pytest.fixture(scope="module")
def drilled(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("balance")
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d")
    with server:
        yield Drilled.of(server, RANKS)
    assert server.leftovers() == []


def switches(server: Server) -> int:
    return server.log.count("experts moved here; dose")


def wait_for_a_switch(story: Story, server: Server) -> None:
    before = switches(server)
    wait_for(lambda: switches(server) >= before + RANKS, "all ranks switch")
    wait_for_answers(story.load)


def test_experts_move_under_load_and_status_shows_the_balance(
    drilled: Drilled, capsys: pytest.CaptureFixture[str]
) -> None:
    story = drilled.story()
    with story.load:
        wait_for(lambda: switches(drilled.server) >= RANKS, "all ranks switch")
        wait_for_answers(story.load, 10)
        capsys.readouterr()
        assert cli.main(["status", "--dir", str(drilled.server.directory)]) == 0
        shown = json.loads(capsys.readouterr().out)["balance"]
    drilled.check(story)
    assert 0 < shown["worst_layer"] <= shown["balancedness"] <= 1
    assert shown["doses"] >= 1


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_experts_move(drilled: Drilled, point: str, rank: int) -> None:
    story = drilled.story()
    before = story.target.ranks()[rank].incarnation
    story.target.arm(rank, point, "kill")
    with story.load:
        assert story.target.wait_until_fired(rank, point, 240.0), f"never passed: {point}"
        assert story.wait_until_back(RANKS, {rank: before}, 240.0), drilled.server.log[-3000:]
        wait_for_answers(story.load, 10)
    drilled.check(story)
    assert story.target.armed() == []
