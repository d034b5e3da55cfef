"""The real server with prompts of many portions, while ranks die in the middle of a prefill: every token is right.

What is right is what one rank of stock SGLang answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server
from tests.sglang.drills import Drilled, check_end, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS, PORTION = 4, 12
SHORTEST, LONGEST = 100, 125
"""Of the prompts: each is one chunk of prefill, of nine portions or more."""
# Without the prefix cache: a prompt that comes again is prefilled again.
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on"),
    *("--eep-portion-tokens", str(PORTION), "--disable-radix-cache"),
)


@pytest.fixture(scope="module")
def drilled(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("portions")
    with Server(model, ONE_RANK, place / "one") as stock:
        expected = Drilled.of(stock, RANKS, shortest=SHORTEST, longest=LONGEST)
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d")
    with server:
        yield Drilled(server, RANKS, expected.prompts, expected.wanted)
    check_end(server)


def test_prompts_of_many_portions_are_answered_as_by_one_rank(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load, 2 * len(drilled.prompts))
    drilled.check(story)
    assert f"a step of more than {PORTION} tokens crosses ranks in portions" in drilled.server.log


@pytest.mark.parametrize(
    ("victim", "point", "skip"),
    [
        (0, "dispatch.after_rows", 12),
        (1, "combine.before_rows", 4),
        (2, "combine.mid_pull", 5),
        (3, "dispatch.received", 25),
    ],
)
def test_a_rank_dies_between_two_portions_of_a_prefill(drilled: Drilled, victim: int, point: str, skip: int) -> None:
    """Nothing runs when the fault is armed. So what passes the point is the first prefill, in which every layer has nine
    portions or more, on every rank, whichever has the prompt."""
    story = drilled.story()
    assert story.wait_until_all_run(RANKS)
    before = story.target.ranks()[victim].incarnation
    story.target.arm(victim, point, "kill", skip=skip)
    with story.load:
        assert story.target.wait_until_fired(victim, point, 240.0), f"never passed: {point}"
        assert story.wait_until_back(RANKS, {victim: before}), drilled.server.log[-3000:]
        wait_for_answers(story.load, len(drilled.prompts))
    drilled.check(story)
    assert story.target.armed() == []


def test_ranks_die_at_random_moments_while_all_prefill(drilled: Drilled) -> None:
    choose = random.Random(27)
    story = drilled.story(clients=8)
    with story.load:
        for _ in range(3):
            wait_for_answers(story.load, choose.randrange(1, 4))
            victim = choose.randrange(RANKS)
            before = story.target.ranks()[victim].incarnation
            story.kill(victim)
            assert story.wait_until_back(RANKS, {victim: before}), drilled.server.log[-3000:]
        wait_for_answers(story.load, len(drilled.prompts))
    drilled.check(story)
