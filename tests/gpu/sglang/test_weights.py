"""On a GPU, too, a rank that is lost finds its weights in place, and ranks of a GPU hold what they share once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eep.anchor.anchor import list_held
from eep.drill.load import ask
from eep.drill.sglang_server import FOUR_RANKS
from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled, lives_of, wait_for_answers

pytestmark = pytest.mark.timeout(900)
RANKS = 4
KEPT = ("--eep-keep-weights", "on")
TAKEN = "this life takes over the weights of "


def test_lives_take_over_weights(model: Path, mps: dict[str, str], tmp_path: Path) -> None:
    """Also in views with other experts in their slots, and two at once."""
    with serving(model, tmp_path, mps, *FOUR_RANKS, *KEPT) as server:
        drilled = Drilled.of(server, prompts=8, tokens=64, continued=True)
        story = drilled.story(clients=16)
        assert server.directory is not None
        held = [each for each in list_held(server.directory) if each.name.startswith("dense-")]
        assert len(held) == 1, "ranks that have the same weights hold them once"
        with story.load:
            for lost in ((1,), (3,), (0, 2)):
                wait_for_answers(story.load, 16)
                lives = lives_of(story, *lost)
                for rank in lost:
                    story.kill(rank)
                assert story.wait_until_back(RANKS, lives), server.log[-3000:]
            wait_for_answers(story.load, 16)
        drilled.check(story)
        assert server.log.count(TAKEN) == 4, "each of them has taken over its weights"


def test_the_next_server_takes_over_weights(model: Path, mps: dict[str, str], tmp_path: Path) -> None:
    place, prompts = tmp_path / "anchor", [[7, 9, 11, 13], [5, 4, 3, 2, 1, 6]]
    command = [sys.executable, "-m", "eep.cli", "anchor", "serve", "--dir", str(place)]
    answers = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as anchor:
        assert anchor.stdout is not None
        anchor.stdout.readline()
        try:
            for number in range(2):
                (tmp_path / str(number)).mkdir()
                flags = (*FOUR_RANKS, *KEPT, "--eep-anchor", str(place))
                with serving(model, tmp_path / str(number), mps, *flags) as server:
                    answers.append([ask(server.url, prompt, 32).tokens for prompt in prompts])
                    assert server.log.count(TAKEN + "an earlier server") == 4 * number
        finally:
            anchor.terminate()
    assert answers[0] == answers[1]
