"""Ranks of the real server are killed and stopped while clients stream: no request fails, and every token is right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.load import Load
from eep.drill.server import FOUR_RANKS, Server
from eep.drill.story import Story

pytestmark = pytest.mark.timeout(900)

RANKS = 4
# Room for every expert on every rank: one rank alone can serve.
ELASTIC = (*FOUR_RANKS, "--eep-redundant-experts", "48", "--eep-timeout-ms", "20000")


@dataclass
class Drilled:
    server: Server
    directory: Path
    prompts: list[list[int]]
    wanted: list[list[int]]

    def story(self, clients: int = 6) -> Story:
        return Story(self.directory, Load(self.server.url, self.prompts, self.wanted, clients))


@pytest.fixture(scope="module")
def drilled(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("drill")
    choose = random.Random(3)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(10)]
    server = Server(model, ELASTIC, place / "log", directory=place / "d")
    with server:
        wanted = list(Load.with_reference(server.url, prompts).wanted)
        yield Drilled(server, place / "d", prompts, [list(tokens) for tokens in wanted])
    assert server.leftovers() == []
    assert "starts as incarnation" not in server.log.partition("SIGTERM received")[2], "nobody is relaunched at the end"


def check(drilled: Drilled, story: Story) -> None:
    """Everybody is back, nothing failed, nothing was wrong."""
    assert story.wait_until_all_run(RANKS), drilled.server.log[-3000:]
    story.load.stop()
    story.close()
    assert story.load.answers
    assert [answer.problem for answer in story.load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []
    assert all(
        answer.usage == (len(drilled.prompts[answer.prompt]), len(answer.tokens)) for answer in story.load.answers
    ), "the counts are those of a run without faults"


def test_each_rank_in_turn(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        for rank in range(RANKS):
            time.sleep(1.0)
            fault = story.kill(rank)
            assert story.wait_until_noticed(fault)
            assert story.wait_until_all_run(RANKS), drilled.server.log[-3000:]
    check(drilled, story)


def test_two_at_once(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(1.0)
        for rank in (0, 2):
            story.kill(rank)
        time.sleep(1.0)
    check(drilled, story)


def test_three_of_four(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(1.0)
        for rank in (0, 1, 3):
            story.kill(rank)
        time.sleep(1.0)
    check(drilled, story)


def test_a_kill_during_recovery_and_during_rejoin(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(1.0)
        story.kill(1)
        story.kill(2)  # while the loss of the first is being repaired
        time.sleep(2.0)
        story.target.try_kill(1)  # while it is coming back, or just back
        time.sleep(1.0)
    check(drilled, story)


def test_all_at_once(drilled: Drilled) -> None:
    """Requests wait for the relaunch."""
    story = drilled.story(clients=3)
    with story.load:
        time.sleep(1.0)
        for rank in range(RANKS):
            story.kill(rank)
        time.sleep(1.0)
    check(drilled, story)


def test_a_rank_that_stands_still_for_a_moment_costs_only_time(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(0.5)
        story.target.stop(3)
        time.sleep(1.0)
        story.target.resume(3)
        time.sleep(1.0)
    check(drilled, story)


def test_random_kills(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        kills = list(story.target.drill(20.0, 2.0, seed=20261115, most=3))
    assert len(kills) >= 5
    check(drilled, story)
