"""Ranks of the real server are killed and stopped while clients stream: no request fails, and every token is right."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

import pytest

from tests.sglang.drills import Drilled, descriptors, is_started_again, lives_of, scrape, wait_for, wait_for_answers

pytestmark = pytest.mark.timeout(900)

RANKS = 4
MANY, PACE, LONGEST_DRILL = 30, 2.0, 300.0


def test_each_rank_in_turn(drilled: Drilled) -> None:
    """None of them loads its weights again."""
    story, before = drilled.story(), len(drilled.server.log)
    with story.load:
        for rank in range(RANKS):
            wait_for_answers(story.load)
            fault = story.kill(rank)
            assert story.wait_until_noticed(fault)
            assert story.wait_until_all_run(RANKS), drilled.server.log[-3000:]
    drilled.check(story)
    assert drilled.server.log[before:].count("this life takes over the weights of life") == RANKS


def test_a_kill_has_a_json_line_of_each_survivor_and_one_of_the_change(drilled: Drilled) -> None:
    story, before = drilled.story(), len(drilled.server.log)
    with story.load:
        wait_for_answers(story.load)
        lives = lives_of(story, 2)
        assert story.wait_until_noticed(story.kill(2))
        assert story.wait_until_back(RANKS, lives), drilled.server.log[-3000:]
        wait_for_answers(story.load)
    drilled.check(story)

    def told(event: str) -> list[dict[str, Any]]:
        lines = (line[line.find("{") :] for line in drilled.server.log[before:].splitlines() if f'"{event}"' in line)
        return [json.loads(line) for line in lines]

    wait_for(lambda: any(each["lost"] == [2] for each in told("eep.change")), "the line of the change")
    (change,) = (each for each in told("eep.change") if each["lost"] == [2])
    settled = [each for each in told("eep.settled") if each["epoch"] == change["epoch"]]
    assert sorted(each["rank"] for each in settled) == [0, 1, 3]
    assert sum(each["experts"] for each in settled) == change["experts"]
    assert all(0 < each["settled_ms"] <= change["total_ms"] for each in settled)


@pytest.mark.parametrize("lost", [(0, 2), (0, 1, 3)], ids=["two", "three"])
def test_several_at_once(drilled: Drilled, lost: tuple[int, ...]) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load)
        lives = lives_of(story, *lost)
        for rank in lost:
            story.kill(rank)
        assert story.wait_until_back(RANKS, lives), drilled.server.log[-3000:]
        wait_for_answers(story.load)
    drilled.check(story)


def test_a_kill_during_recovery_and_during_rejoin(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load)
        lives = lives_of(story, 1, 2)
        story.kill(1)
        story.kill(2)  # while the loss of the first is being repaired
        wait_for(lambda: is_started_again(story, 1, lives[1]), "rank 1 has a new process")
        joiner = story.target.ranks()[1].incarnation
        story.kill(1)  # while it comes back
        assert story.wait_until_back(RANKS, {**lives, 1: joiner}), drilled.server.log[-3000:]
        wait_for_answers(story.load)
    drilled.check(story)


def test_after_a_loss_of_all_one_that_hangs_does_not_hold_up_the_others(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load)
        lives = lives_of(story, *range(RANKS))
        for rank in range(RANKS):
            story.kill(rank)
        wait_for(lambda: is_started_again(story, 2, lives[2]), "rank 2 has a new process")
        story.target.stop(2)
        # Its next life may be in with them: a stopped one is fenced before long.
        assert story.wait_until_run((0, 1, 3), with_others=True), drilled.server.log[-3000:]
        wait_for_answers(story.load)
        story.target.resume(2)
        assert story.wait_until_back(RANKS, lives), drilled.server.log[-3000:]
    drilled.check(story)


def test_a_rank_that_stands_still_for_a_moment_costs_only_time(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load)
        before = lives_of(story, *range(RANKS))
        story.target.stop(3)
        time.sleep(0.2)  # for so long it stands still
        story.target.resume(3)
        wait_for_answers(story.load)
    drilled.check(story)
    assert lives_of(story, *range(RANKS)) == before, "no rank was relaunched"


@pytest.mark.parametrize("count", [10, pytest.param(MANY, marks=pytest.mark.long)])
def test_random_kills_at_times_of_all_ranks(drilled: Drilled, count: int) -> None:
    """At a pace of thirty in a minute, where the ranks come back fast enough to be killed so often. Requests wait for a rank
    when there is none."""
    before, opened = scrape(drilled.server), descriptors(drilled.server)
    story = drilled.story()
    with story.load:
        kills = list(islice(story.target.drill(LONGEST_DRILL, PACE, seed=20261115, most=RANKS), count))
    print(f"{count} kills in {kills[-1][0] - kills[0][0]:.0f} s")
    assert len(kills) == count
    assert {rank for _, rank in kills} == set(range(RANKS))
    drilled.check(story)
    check_descriptors(opened, descriptors(drilled.server))
    if count == MANY:
        assert any(not view.active for _, view, _ in story.views), "at some moment no rank was left"
    told = scrape(drilled.server)
    assert told["eep_epoch"] == story.views[-1][1].epoch
    check_figures(before, told, count)


def check_descriptors(before: Mapping[int, int], after: Mapping[int, int]) -> None:
    more = {pid: now - before[pid] for pid, now in after.items() if pid in before}
    assert len(more) >= 3, "the front end, the controller and what forks ranks outlive them"
    assert max(more.values()) < MANY / 2, f"descriptors that processes have opened and not closed: {more}"


def check_figures(before: Mapping[str, float], told: Mapping[str, float], kills: int) -> None:
    assert told["eep_active_ranks"] == RANKS
    # A process that is killed twice dies once.
    assert 1 <= told["eep_rank_deaths_total"] - before["eep_rank_deaths_total"] <= kills
    for figure in ("eep_rank_joins_total", "eep_rank_relaunches_total", "eep_requests_moved_total"):
        assert told[figure] > before[figure], figure
    for figure in ("eep_steps_repeated_total", "eep_last_pause_seconds", 'eep_repair_bytes_total{tier="peer"}'):
        assert figure in told
    for figure in ("eep_margin_repairable_ranks", "eep_uncovered_experts", "eep_open_requests"):
        assert figure in told, "the front end looks these up"
    exits = 'eep_rank_losses_total{cause="exit"}'
    assert 1 <= told[exits] - before[exits] <= kills
    assert told["eep_pause_seconds_count"] > before["eep_pause_seconds_count"]
