"""Without MPS ranks on one GPU take turns: slow, and nothing depends on it. A rank is killed in the middle of its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled, wait_for_answers

pytestmark = pytest.mark.timeout(900)
TWO_RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep")


def test_a_kill_without_mps(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, {}, *TWO_RANKS, "--eep-redundant-experts", "16") as server:
        drilled = Drilled.of(server, ranks=2, prompts=4, tokens=16, continued=True)
        story = drilled.story(clients=4)
        with story.load:
            wait_for_answers(story.load)
            assert story.wait_until_noticed(story.kill(0))
            assert story.wait_until_all_run(2), server.log[-3000:]
            wait_for_answers(story.load)
        drilled.check(story)
