"""Processes of the real server that are no ranks are killed while clients stream: each is replaced, and no client sees it."""

from __future__ import annotations

import pytest

from eep.observe.event_log import read_events
from tests.sglang import server_processes as processes
from tests.sglang.drills import Drilled, lives_of, wait_for, wait_for_answers
from tests.sglang.roomy.test_kills import RANKS

pytestmark = pytest.mark.timeout(900)


def test_those_that_are_killed_are_replaced(drilled: Drilled) -> None:
    """Python starts another resource tracker when it starts the next process, here the detokenizer."""
    server, story = drilled.server, drilled.story()
    before = lives_of(story, *range(RANKS))
    with story.load:
        wait_for_answers(story.load)
        tracker = processes.kill(server, processes.TRACKER)
        for kind in (processes.KEEPER, processes.DETOKENIZER, processes.DETOKENIZER):
            wait_for_answers(story.load)
            processes.wait_for_next(server, kind, processes.kill(server, kind))
        processes.wait_for_next(server, processes.TRACKER, tracker)
        wait_for_answers(story.load)
    drilled.check(story)
    assert lives_of(story, *range(RANKS)) == before, "no rank was lost"


def test_ranks_outlive_the_process_that_they_are_forked_from(drilled: Drilled) -> None:
    """Its copy takes its place, and ranks that are lost come back from there."""
    server, story = drilled.server, drilled.story()
    assert server.directory is not None
    before = lives_of(story, *range(RANKS))
    with story.load:
        for _ in range(2):
            wait_for(lambda: None not in story.target.fork_servers(), "there is a copy")
            wait_for_answers(story.load)
            killed, copy = story.target.fork_servers()
            assert processes.kill(server, processes.RANK_FORK_SERVER) == killed
            assert killed is not None
            assert processes.wait_for_next(server, processes.RANK_FORK_SERVER, killed) == copy
        wait_for_answers(story.load)
        assert lives_of(story, *range(RANKS)) == before, "no rank was lost"
        story.kill(1)
        assert story.wait_until_back(RANKS, {1: before[1]}), server.log[-3000:]
        wait_for_answers(story.load)
    drilled.check(story)
    told = [event.cause for event in read_events(server.directory / "events.jsonl") if event.phase == "FORK-SERVER"]
    assert f"process {copy}) takes its place" in told[-2]
