"""Ranks of the real server are killed and stopped while clients stream: no request fails, and every token is right."""

from __future__ import annotations

import os
import random
import time
import urllib.request
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from eep.drill.load import Load
from eep.drill.server import Server
from eep.drill.story import Story

pytestmark = pytest.mark.timeout(900)

RANKS = 4
KILLS, PACE, LONGEST_DRILL = 30, 2.0, 300.0


@dataclass
class Drilled:
    server: Server
    directory: Path
    prompts: list[list[int]]
    wanted: list[list[int]]

    def story(self, clients: int = 6) -> Story:
        return Story(self.directory, Load(self.server.url, self.prompts, self.wanted, clients))


@pytest.fixture(scope="module")
def drilled(roomy: Server) -> Drilled:
    choose = random.Random(3)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(10)]
    wanted = [list(tokens) for tokens in Load.with_reference(roomy.url, prompts).wanted]
    assert roomy.directory is not None
    return Drilled(roomy, roomy.directory, prompts, wanted)


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


def scrape(server: Server) -> dict[str, float]:
    """Our figures, as SGLang's own endpoint shows them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("eep_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def descriptors(server: Server) -> dict[int, int]:
    """How many each process of the server has open."""
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in server.processes()}


def test_each_rank_in_turn(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        for rank in range(RANKS):
            time.sleep(0.3)
            fault = story.kill(rank)
            assert story.wait_until_noticed(fault)
            assert story.wait_until_all_run(RANKS), drilled.server.log[-3000:]
    check(drilled, story)


@pytest.mark.parametrize("lost", [(0, 2), (0, 1, 3)], ids=["two", "three"])
def test_several_at_once(drilled: Drilled, lost: tuple[int, ...]) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(0.5)
        for rank in lost:
            story.kill(rank)
        time.sleep(0.5)
    check(drilled, story)


def test_a_kill_during_recovery_and_during_rejoin(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(0.5)
        story.kill(1)
        story.kill(2)  # while the loss of the first is being repaired
        time.sleep(2.0)
        story.target.try_kill(1)  # while it is coming back, or just back
        time.sleep(0.5)
    check(drilled, story)


def test_a_rank_that_stands_still_for_a_moment_costs_only_time(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        time.sleep(0.5)
        story.target.stop(3)
        time.sleep(1.0)
        story.target.resume(3)
        time.sleep(0.5)
    check(drilled, story)


def test_thirty_random_kills_at_times_of_all_ranks(drilled: Drilled) -> None:
    """At a pace of thirty in a minute, where the ranks come back fast enough to be killed so often. Requests wait for a rank
    when there is none."""
    before, opened = scrape(drilled.server), descriptors(drilled.server)
    story = drilled.story()
    with story.load:
        kills = list(islice(story.target.drill(LONGEST_DRILL, PACE, seed=20261115, most=RANKS), KILLS))
    print(f"{KILLS} kills in {kills[-1][0] - kills[0][0]:.0f} s")
    assert len(kills) == KILLS
    assert {rank for _, rank in kills} == set(range(RANKS))
    check(drilled, story)
    more = {pid: count - opened[pid] for pid, count in descriptors(drilled.server).items() if pid in opened}
    assert len(more) >= 3, "the front end, the controller and what forks ranks outlive them"
    assert max(more.values()) < KILLS / 2, f"descriptors that processes have opened and not closed: {more}"
    assert any(not view.active for _, view, _ in story.views), "at some moment nobody was left"
    told = scrape(drilled.server)
    assert told["eep_active_ranks"] == RANKS
    assert told["eep_epoch"] == story.views[-1][1].epoch
    # A process that is killed twice dies once.
    assert 1 <= told["eep_rank_deaths_total"] - before["eep_rank_deaths_total"] <= KILLS
    for figure in ("eep_rank_joins_total", "eep_rank_relaunches_total", "eep_requests_moved_total"):
        assert told[figure] > before[figure], figure
    for figure in ("eep_steps_repeated_total", "eep_last_pause_seconds", 'eep_repair_bytes_total{tier="peer"}'):
        assert figure in told
