"""Four ranks on a GPU say what one rank of stock SGLang says there, in float32."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from eep.drill.devices import CUDA
from eep.drill.load import Load, ask
from eep.drill.server import FOUR_RANKS, ONE_RANK, Server
from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """What one rank says, without ``--ep-backend eep``."""
    with Server(model, ONE_RANK, tmp_path_factory.mktemp("one") / "log", device=CUDA) as server:
        answers = Drilled.of(server, ranks=1, prompts=16, tokens=64)
    assert server.leftovers() == []
    return answers


def test_answers_differ_from_each_other(alone: Drilled) -> None:
    assert len({tuple(each) for each in alone.wanted}) == len(alone.prompts)


def test_four_ranks_answer_as_one_does(
    alone: Drilled, model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One by one, and many at once."""
    with serving(model, tmp_path_factory.mktemp("four"), mps, *FOUR_RANKS) as server:
        for prompt, wanted in zip(alone.prompts, alone.wanted, strict=True):
            assert ask(server.url, prompt, len(wanted)).tokens == wanted
        load = Load(server.url, alone.prompts, alone.wanted, clients=32)
        load.start()
        while len(load.answers) < 20 * len(alone.prompts) and not load.failed:
            time.sleep(0.1)
        load.stop()
    assert load.failed == []
    assert load.wrong == []
