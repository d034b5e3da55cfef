"""On a GPU, too, spares are whole ranks: their graphs were captured over placeholders, and run over the memory of the rank
that was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import FOUR_RANKS
from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled, lives_of, wait_for_answers

pytestmark = pytest.mark.timeout(900)
RANKS = 4
BEGINS = "a spare begins as incarnation"


def test_lost_ranks_come_back_as_spares(model: Path, mps: dict[str, str], tmp_path: Path) -> None:
    """Each rank in turn, then two at once: eight, sixteen and more rows of a batch go through every graph of a spare."""
    flags = (*FOUR_RANKS, "--eep-keep-weights", "on", "--eep-spares", str(RANKS))
    with serving(model, tmp_path, mps, *flags) as server:
        drilled = Drilled.of(server, prompts=8, tokens=64, continued=True)
        assert server.directory is not None
        target, story = Target(server.directory), drilled.story(clients=32)
        with story.load:
            for number, lost in enumerate(((1,), (3,), (0, 2), (1,))):
                assert len(target.wait_for_spares(RANKS)) == RANKS, server.log[-3000:]
                wait_for_answers(story.load, 16)
                lives = lives_of(story, *lost)
                for rank in lost:
                    story.kill(rank)
                assert story.wait_until_back(RANKS, lives), server.log[-3000:]
                assert server.log.count(BEGINS) == (1, 2, 4, 5)[number]
            wait_for_answers(story.load, 16)
        drilled.check(story)
