"""Without MPS ranks on one GPU take turns: slow, and nothing depends on it. Ranks are killed in the middle of their turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled, wait_for_answers

pytestmark = pytest.mark.timeout(900)
TWO_RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep")


KILLS = 4


def test_kills_without_mps(model: Path, tmp_path: Path) -> None:
    """Under MPS the driver may end every process of the GPU with the killed one. Here the other rank lives on, each time."""
    with serving(model, tmp_path, {}, *TWO_RANKS, "--eep-redundant-experts", "16", "--eep-spares", "2") as server:
        drilled = Drilled.of(server, ranks=2, prompts=8, tokens=16, continued=True)
        story = drilled.story(clients=16)
        with story.load:
            for number in range(KILLS):
                wait_for_answers(story.load)
                killed, other = number % 2, 1 - number % 2
                before = story.target.ranks()
                assert story.wait_until_noticed(story.kill(killed))
                assert story.wait_until_back(2, {killed: before[killed].incarnation}), server.log[-3000:]
                assert story.target.ranks()[other].incarnation == before[other].incarnation
            wait_for_answers(story.load)
        drilled.check(story)
