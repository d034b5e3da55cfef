"""Four ranks on a GPU say what one rank of stock SGLang says there, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.devices import CUDA
from eep.drill.load import Load, ask
from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server
from eep.drill.token_certainty import clear_prompts
from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled, wait_for_answers

pytestmark = pytest.mark.timeout(900)


AS_IN_WARMING_UP = [[first, *[1] * (length - 1)] for first in range(1, 24) for length in (2, 5, 17)]
"""Prompts that begin as those do with which a rank warms up."""


@dataclass(frozen=True)
class Alone:
    """What one rank says, without ``--ep-backend eep``."""

    prompts: list[list[int]]
    wanted: list[list[int]]
    beginnings: Load
    """The clearest of those that begin as in warming up."""


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    with Server(model, ONE_RANK, tmp_path_factory.mktemp("one") / "log", device=CUDA) as server:
        answers = Drilled.of(server, ranks=1, prompts=16, tokens=64)
        clear = clear_prompts(server.url, AS_IN_WARMING_UP, 8, 32)
        beginnings = Load.with_reference(server.url, clear, tokens=32)
    assert server.leftovers() == []
    return Alone(answers.prompts, answers.wanted, beginnings)


def test_answers_differ_from_each_other(alone: Alone) -> None:
    assert len({tuple(each) for each in alone.wanted}) == len(alone.prompts)


def test_four_ranks_answer_as_one_does(
    alone: Alone, model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One by one, and many at once."""
    with serving(model, tmp_path_factory.mktemp("four"), mps, *FOUR_RANKS) as server:
        for prompt, wanted in zip(alone.prompts, alone.wanted, strict=True):
            assert ask(server.url, prompt, len(wanted)).tokens == wanted
        load = Load(server.url, alone.prompts, alone.wanted, clients=32)
        with load:
            wait_for_answers(load, 20 * len(alone.prompts), within=600)
    assert load.failed == []
    assert load.wrong == []


def test_four_ranks_answer_as_one_does_with_a_prefix_cache_through_a_kill(
    alone: Alone, model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing is found there that a rank computed alone, while it warmed up, or that a step left which was cut short."""
    place = tmp_path_factory.mktemp("caching")
    with serving(model, place, mps, *FOUR_RANKS, "--eep-spares", "1", device=CUDA.caching()) as server:
        for prompt, wanted in zip(alone.beginnings.prompts, alone.beginnings.wanted, strict=True):
            for rank in range(4):
                assert ask(server.url, prompt, len(wanted), rank=rank).tokens == wanted
        drilled = Drilled.of(server, prompts=8, tokens=64, continued=True)
        story = drilled.story(clients=16)
        story.load.start()
        wait_for_answers(story.load, 16)
        assert story.wait_until_noticed(story.kill(2))
        assert story.wait_until_all_run(4), server.log[-3000:]
        wait_for_answers(story.load, 16)
        drilled.check(story)
