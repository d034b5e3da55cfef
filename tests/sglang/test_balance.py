"""Experts move while clients stream: every token is right, also where a rank is killed while it stages or has just
switched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep import cli
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.balanced_server import BALANCING, POINTS, RANKS, Balanced
from tests.sglang.drills import Drilled, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
ARGUMENTS = (*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", *BALANCING)


@pytest.fixture(scope="module")
def balanced(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    place = tmp_path_factory.mktemp("balance")
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d")
    with server:
        yield Balanced(Drilled.of(server, RANKS))
    assert server.leftovers() == []


def test_experts_move_under_load_and_status_shows_the_balance(
    balanced: Balanced, capsys: pytest.CaptureFixture[str]
) -> None:
    balanced.check_that_experts_move(capsys)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_experts_move(balanced: Balanced, point: str, rank: int) -> None:
    balanced.check_a_kill_while_they_move(point, rank)


def test_experts_move_among_the_ranks_that_are_left(balanced: Balanced, capsys: pytest.CaptureFixture[str]) -> None:
    """And when the rank is back, nothing that moved moves back."""
    drilled = balanced.next_part()
    story = drilled.story()
    directory = str(balanced.server.directory)
    with story.load:
        assert cli.main(["rank", "remove", "1", "--dir", directory]) == 0
        assert story.wait_until_run((0, 2, 3)), balanced.server.log[-3000:]
        before = balanced.switches()
        wait_for(lambda: balanced.switches() >= before + RANKS - 1, "the three ranks switch")
        wait_for_answers(story.load, 10)
        brought_in = balanced.server.log.count("experts brought in")
        assert cli.main(["rank", "launch", "1", "--dir", directory]) == 0
        assert story.wait_until_all_run(RANKS), balanced.server.log[-3000:]
        wait_for_answers(story.load, 10)
    drilled.check(story)
    assert balanced.server.log.count("experts brought in") <= brought_in + 1, "only the rank that is back may lack some"
