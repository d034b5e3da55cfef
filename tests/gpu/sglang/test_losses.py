"""Four ranks on a GPU say what one rank of stock SGLang says there, in float32, also while they are lost one at a time. With
the default number of slots, others bring in what a lost one had."""

from __future__ import annotations

import os
import signal
import time

import pytest

from eep.anchor.anchor import list_held
from eep.drill.faults import Target
from eep.drill.load import Load, ask
from tests.gpu.sglang.conftest import Alone
from tests.gpu.sglang.long_contexts import check_that_contexts_come_along
from tests.sglang.drills import Drilled, is_started_again, lives_of, scrape, wait_for, wait_for_answers

pytestmark = pytest.mark.timeout(900)
SPARE_BEGINS = "a spare begins as incarnation"


def spares(target: Target) -> list[int]:
    """One for each rank."""
    found = target.wait_for_spares(4)
    assert len(found) == 4, "not all spares were ready in time"
    return found


def test_four_ranks_answer_as_one_does(alone: Alone, bounded: Drilled) -> None:
    """One by one, and many at once."""
    for prompt, wanted in zip(alone.prompts, alone.wanted, strict=True):
        assert ask(bounded.server.url, prompt, len(wanted)).tokens == wanted
    load = Load(bounded.server.url, alone.prompts, alone.wanted, clients=32)
    with load:
        wait_for_answers(load, 20 * len(alone.prompts), within=600)
    assert load.failed == []
    assert load.wrong == []


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_is_killed_and_comes_back_from_a_spare(bounded: Drilled, rank: int) -> None:
    """Some of these kills hit a graph that is being replayed: survivors run that step again."""
    story = bounded.story(clients=16)
    ready = spares(story.target)
    with story.load:
        wait_for_answers(story.load, 16)
        fault = story.kill(rank)
        assert story.wait_until_noticed(fault)
        assert story.wait_until_all_run(bounded.ranks), bounded.server.log[-3000:]
        assert story.target.ranks()[rank].pid in ready
        wait_for_answers(story.load)
    bounded.check(story)


def test_steps_were_run_again(bounded: Drilled) -> None:
    """The same server: at least one of those kills came while the others were in a step."""
    assert scrape(bounded.server)["eep_steps_repeated_total"] > 0


def test_a_rank_that_stands_still_for_a_moment_costs_only_time(bounded: Drilled) -> None:
    story = bounded.story(clients=16)
    before = {rank: each.incarnation for rank, each in story.target.ranks().items()}
    with story.load:
        wait_for_answers(story.load)
        story.target.stop(3)
        time.sleep(0.2)  # for so long it stands still
        story.target.resume(3)
        wait_for_answers(story.load)
    bounded.check(story)
    assert {rank: each.incarnation for rank, each in story.target.ranks().items()} == before


def test_a_joiner_is_killed(bounded: Drilled) -> None:
    story = bounded.story(clients=16)
    life = story.target.ranks()[1].incarnation
    spares(story.target)
    with story.load:
        wait_for_answers(story.load)
        assert story.wait_until_noticed(story.kill(1))
        wait_for(lambda: is_started_again(story, 1, life), "rank 1 has a new process")
        joiner = story.target.ranks()[1].incarnation
        story.kill(1)  # it has no spare now: another is prepared only when the rank runs
        assert story.wait_until_back(bounded.ranks, {1: joiner})
    bounded.check(story)


def test_a_spare_is_killed(bounded: Drilled) -> None:
    """No client notices, and another spare takes its place."""
    story = bounded.story(clients=16)
    spare, *_ = spares(story.target)
    epoch = story.views[-1][1].epoch if story.wait_until_all_run(bounded.ranks) else -1
    with story.load:
        os.kill(spare, signal.SIGKILL)
        wait_for(lambda: set(story.target.spares()) - {spare}, "another spare is ready")
        wait_for_answers(story.load)
    bounded.check(story)
    assert story.views[-1][1].epoch == epoch


def test_graphs_of_spares_run_over_the_memory_of_the_rank_that_was_lost(bounded: Drilled) -> None:
    """Each rank in turn, then two at once: eight, sixteen and more rows of a batch go through every graph of a spare."""
    server, story = bounded.server, bounded.story(clients=32)
    assert server.directory is not None
    held = [each for each in list_held(server.directory) if each.name.startswith("dense-")]
    assert len(held) == 1, "ranks that have the same weights hold them once"
    before = server.log.count(SPARE_BEGINS)
    with story.load:
        for number, lost in enumerate(((1,), (3,), (0, 2), (1,))):
            spares(story.target)
            wait_for_answers(story.load, 16)
            lives = lives_of(story, *lost)
            for rank in lost:
                story.kill(rank)
            assert story.wait_until_back(bounded.ranks, lives), server.log[-3000:]
            assert server.log.count(SPARE_BEGINS) - before == (1, 2, 4, 5)[number]
        wait_for_answers(story.load, 16)
    bounded.check(story)


def test_contexts_come_along_without_a_prefix_cache(bounded: Drilled) -> None:
    check_that_contexts_come_along(bounded.server)
