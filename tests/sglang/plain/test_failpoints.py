"""Faults at named points of a recovery of the real server, under load: every rank comes back, and every token is right.

CI runs a sample on one server; ``make soak`` runs all of the matrix, with ranks that stand still as well as ranks that die.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from tests import failpoints
from tests.sglang.drills import wait_for_answers

pytestmark = pytest.mark.timeout(900)

RANKS = 4
PATIENCE = 240.0

CASES = failpoints.matrix()


@dataclass
class Drilled:
    server: Server
    directory: Path
    prompts: list[list[int]]
    wanted: list[list[int]]

    def story(self) -> Story:
        return Story(self.directory, Load(self.server.url, self.prompts, self.wanted, clients=4))


@pytest.fixture(scope="module")
def drilled(plain: Server) -> Drilled:
    choose = random.Random(4)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(6)]
    wanted = [list(tokens) for tokens in Load.with_reference(plain.url, prompts).wanted]
    assert plain.directory is not None
    return Drilled(plain, plain.directory, prompts, wanted)


SAMPLE = failpoints.every_role_once(CASES)


@pytest.mark.parametrize("case", CASES + failpoints.stops(CASES) if failpoints.EVERYTHING else SAMPLE, ids=str)
def test_a_fault_at_a_named_point(drilled: Drilled, case: failpoints.Case) -> None:
    story = drilled.story()
    target = story.target
    assert story.wait_until_all_run(RANKS, PATIENCE), drilled.server.log[-3000:]
    before = target.ranks()
    fired = len(target.fired())
    with story.load:
        wait_for_answers(story.load, within=PATIENCE)
        target.arm(case.armed, case.point, case.action, sleep_ms=500)
        if case.role == "joiner":
            story.kill(case.victim)
        else:
            target.arm(case.victim, failpoints.FIRST_LOSS, "kill")
            assert target.wait_until_fired(case.victim, failpoints.FIRST_LOSS, PATIENCE)
        assert target.wait_until_fired(case.armed, case.point, PATIENCE), f"never passed: {case.point}"
        lost = {case.victim: before[case.victim].incarnation}
        if case.armed is not None:
            # A joiner has died twice: as the one that was lost, and on its way back in.
            lost[case.armed] = before[case.armed].incarnation + (case.role == "joiner")
        assert story.wait_until_back(RANKS, lost, PATIENCE), drilled.server.log[-3000:]
    check_answers(story)
    acted = [(line.rank, line.operation) for line in target.fired()[fired:]]
    assert acted.count((case.armed, case.point)) == 1
    assert target.armed() == []


def test_a_rank_that_stands_still_between_two_steps_is_replaced(drilled: Drilled) -> None:
    """No peer waits for it within a step: the others notice when they are to begin the next one."""
    story = drilled.story()
    assert story.wait_until_all_run(RANKS, PATIENCE), drilled.server.log[-3000:]
    before = story.target.ranks()[2].incarnation
    with story.load:
        wait_for_answers(story.load, within=PATIENCE)
        story.target.arm(2, "step.trusted", "stop")
        assert story.target.wait_until_fired(2, "step.trusted", PATIENCE)
        assert story.wait_until_back(RANKS, {2: before}, PATIENCE), drilled.server.log[-3000:]
    check_answers(story)


def check_answers(story: Story) -> None:
    story.close()
    assert story.load.answers
    assert [answer.problem for answer in story.load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []
