"""On a GPU, too, a server finds the weights of the one before it in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eep.drill.load import ask
from eep.drill.sglang_server import FOUR_RANKS
from tests.gpu.sglang.conftest import serving

pytestmark = pytest.mark.timeout(900)
TAKEN = "this life takes over the weights of "


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
                flags = (*FOUR_RANKS, "--eep-anchor", str(place))
                with serving(model, tmp_path / str(number), mps, *flags) as server:
                    answers.append([ask(server.url, prompt, 32).tokens for prompt in prompts])
                    assert server.log.count(TAKEN + "an earlier server") == 4 * number
        finally:
            anchor.terminate()
    assert answers[0] == answers[1]
