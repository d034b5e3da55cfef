"""On a GPU, too, a request that moves takes its context along: the entries of its cache are those of the lost rank. Into a
prefix cache, which may hold only what the whole model computes; ``test_losses.py`` has a server without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eep.drill.devices import CUDA
from eep.drill.load import ask
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.gpu.sglang.conftest import A_SPARE_EACH, SLOTS_FOR_ALL, Alone, serving
from tests.gpu.sglang.long_contexts import check_that_contexts_come_along
from tests.sglang.drills import Drilled, wait_for_answers
from tests.sglang.lone_requests import check_that_lone_requests_go_on_as_from_a_prefix

pytestmark = pytest.mark.timeout(900)

RANKS = 4
ROOM = ("--max-total-tokens", "65536")


@pytest.fixture(scope="module")
def caching(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the slots that are there by default, so that a rank alone cannot reach all experts."""
    place = tmp_path_factory.mktemp("caching")
    with serving(model, place, mps, *FOUR_RANKS, *ROOM, *A_SPARE_EACH, device=CUDA.caching()) as server:
        yield server


def test_four_ranks_answer_as_one_does_with_a_prefix_cache_through_a_kill(alone: Alone, caching: Server) -> None:
    """Nothing is found there that a rank computed alone, while it warmed up, or that a step left which was cut short."""
    for prompt, wanted in zip(alone.beginnings.prompts, alone.beginnings.wanted, strict=True):
        for rank in range(RANKS):
            assert ask(caching.url, prompt, len(wanted), rank=rank).tokens == wanted
    drilled = Drilled.of(caching, prompts=8, tokens=64, continued=True)
    story = drilled.story(clients=16)
    story.load.start()
    wait_for_answers(story.load, 16)
    assert story.wait_until_noticed(story.kill(2))
    assert story.wait_until_all_run(RANKS), caching.log[-3000:]
    wait_for_answers(story.load, 16)
    drilled.check(story)


def test_contexts_come_along_into_a_prefix_cache(caching: Server) -> None:
    check_that_contexts_come_along(caching)


def test_in_bfloat16_lone_requests_go_on_as_from_a_prefix(model: Path, mps: dict[str, str], tmp_path: Path) -> None:
    """Of a server in which every rank has every expert (:mod:`tests.sglang.test_bfloat16` says why). The token that is
    computed again goes through the attention of a prefill, which adds up in another order than that of a decode."""
    device = CUDA.caching()
    device = replace(device, flags=(*device.flags, "--dtype", "bfloat16"))
    flags = (*FOUR_RANKS, *SLOTS_FOR_ALL, *ROOM, *A_SPARE_EACH)
    with serving(model, tmp_path, mps, *flags, device=device) as server:
        check_that_lone_requests_go_on_as_from_a_prefix(server, RANKS, (60, 333, 1500, 3000))
