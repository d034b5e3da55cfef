"""Experts move while clients stream: every token is right, also where a rank is killed while it stages or has just switched.

The clients of each test send other prompts than those of the last, and only few: what gates pick is uneven, and changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep import cli, faults
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled, read_status, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS, PARTS = 4, 5
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on"),
    *("--enable-eplb", "--eplb-rebalance-num-iterations", "100", "--eep-staged-experts", "3"),
)
POINTS = [point for point in faults.PLACES if point.startswith("balance.")]


@dataclass
class Balanced:
    drilled: Drilled
    part: int = 0

    @property
    def server(self) -> Server:
        return self.drilled.server

    def next_part(self) -> Drilled:
        """The server with a few of the prompts, and not those of last time."""
        whole, self.part = self.drilled, self.part + 1
        which = slice(self.part % PARTS, None, PARTS)
        return Drilled(whole.server, RANKS, whole.prompts[which], whole.wanted[which])

    def switches(self) -> int:
        return self.server.log.count("experts moved here; dose")


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
    drilled = balanced.next_part()
    story = drilled.story()
    with story.load:
        wait_for(lambda: balanced.switches() >= RANKS, "all ranks switch")
        wait_for_answers(story.load, 10)
        capsys.readouterr()
        assert cli.main(["status", "--json", "--dir", str(balanced.server.directory)]) == 0
        shown = read_status(capsys.readouterr().out)["balance"]
    drilled.check(story)
    assert 0 < shown["worst_layer"] <= shown["balancedness"] <= 1
    assert shown["doses"] >= 1
    assert "experts brought in" not in balanced.server.log, "what moved was staged, and no view changed"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_experts_move(balanced: Balanced, point: str, rank: int) -> None:
    drilled = balanced.next_part()
    story = drilled.story()
    before = story.target.ranks()[rank].incarnation
    story.target.arm(rank, point, "kill")
    with story.load:
        assert story.target.wait_until_fired(rank, point, 240.0), f"never passed: {point}"
        assert story.wait_until_back(RANKS, {rank: before}, 240.0), balanced.server.log[-3000:]
        wait_for_answers(story.load, 10)
    drilled.check(story)
    assert story.target.armed() == []


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
