"""On a GPU, too, experts move while clients stream, copies without tokens wait for a loss, and a rank may serve experts only:
every token is right, with the same captured graphs, also where a rank is killed meanwhile."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep import cli
from eep.drill.sglang_server import FOUR_RANKS
from tests.gpu.sglang.conftest import A_SPARE_EACH, serving
from tests.sglang.balanced_server import BALANCING, POINTS, RANKS, Balanced
from tests.sglang.drills import Drilled, wait_for, wait_for_answers

pytestmark = pytest.mark.timeout(900)
# Sixteen experts, 32 slots: two copies of each.
SHADOWS = ("--eep-redundant-experts", "16", "--eep-shadow-copies", "on")
SHY = 2


@pytest.fixture(scope="module")
def balanced(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    flags = (*FOUR_RANKS, *A_SPARE_EACH, *SHADOWS, *BALANCING, "--eep-faults", "on")
    with serving(model, tmp_path_factory.mktemp("balanced"), mps, *flags) as server:
        yield Balanced(Drilled.of(server, RANKS))


def status(balanced: Balanced) -> dict[str, Any]:
    with urllib.request.urlopen(f"{balanced.server.url}/eep/status", timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def test_experts_move_under_load_and_status_shows_the_balance(
    balanced: Balanced, capsys: pytest.CaptureFixture[str]
) -> None:
    balanced.check_that_experts_move(capsys)


def test_a_rank_is_lost_and_no_expert_is_brought_in(balanced: Balanced) -> None:
    story = balanced.drilled.story(clients=16)
    with story.load:
        for rank in (1, 0):
            margin = status(balanced)["margin"]
            assert (margin["any_ranks"] >= 1, margin["ranks"]) == (True, [0, 1, 2, 3])
            assert story.wait_until_noticed(story.kill(rank))
            assert story.wait_until_all_run(RANKS), balanced.server.log[-3000:]
            wait_for_answers(story.load, 16)
    balanced.drilled.check(story)
    assert "experts brought in" not in balanced.server.log


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_experts_move(balanced: Balanced, point: str) -> None:
    balanced.check_a_kill_while_they_move(point, rank=2)


def test_a_rank_serves_experts_only_and_then_requests_again(balanced: Balanced) -> None:
    def shy() -> dict[str, Any]:
        found: dict[str, Any] = status(balanced)["ranks"][str(SHY)]
        return found

    def set_role(role: str) -> int:
        return cli.main(["rank", "role", str(SHY), role, "--dir", str(balanced.server.directory)])

    def check_that_it_serves_no_request() -> None:
        for _ in range(4):
            wait_for_answers(story.load, 4)
            told = shy()
            assert (told["role"], told["requests"], told["in"]) == ("experts", 0, True)
            assert told["experts"] > 0

    story = balanced.drilled.story(clients=16)
    with story.load:
        wait_for(lambda: shy()["requests"] > 0, "the rank to serve requests")
        assert set_role("experts") == 0
        check_that_it_serves_no_request()
        for rank in (SHY, 0):
            life = story.target.ranks()[rank].incarnation
            story.kill(rank)
            assert story.wait_until_back(RANKS, {rank: life}), balanced.server.log[-3000:]
            check_that_it_serves_no_request()
        assert set_role("both") == 0
        wait_for(lambda: shy()["requests"] > 0, "the rank to serve requests again")
    balanced.drilled.check(story)
