"""On a GPU, too, a request that moves takes its context along: the entries of its cache are those of the lost rank."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from eep.drill.devices import CUDA, Device
from eep.drill.load import Load
from eep.drill.sglang_server import FOUR_RANKS
from eep.drill.story import Story
from eep.drill.token_certainty import clear_prompts
from tests.gpu.sglang.conftest import SLOTS_FOR_ALL, serving
from tests.sglang.drills import wait_for_answers
from tests.sglang.lone_requests import check_that_lone_requests_go_on_alike

pytestmark = pytest.mark.timeout(900)

RANKS, TOKENS = 4, 128
LENGTHS = (40, 150, 400, 900, 1500, 2300, 3000, 3900)
KEPT = ("--eep-keep-context", "on", "--max-total-tokens", "65536")


@pytest.mark.parametrize("device", [CUDA.caching(), CUDA], ids=["with prefix cache", "without"])
def test_contexts_come_along(device: Device, model: Path, mps: dict[str, str], tmp_path: Path) -> None:
    choose = random.Random(3)
    prompts = [[choose.randrange(3, 250) for _ in range(length)] for length in LENGTHS for _ in range(3)]
    flags = (*FOUR_RANKS, *SLOTS_FOR_ALL, *KEPT, "--eep-spares", "2")
    with serving(model, tmp_path, mps, *flags, device=device) as server:
        clear = clear_prompts(server.url, prompts, 16, TOKENS)
        load = Load.with_reference(server.url, clear, tokens=TOKENS, clients=16)
        assert server.directory is not None
        story = Story(server.directory, load)
        with load:
            for lost in ((2,), (1,), (0, 3)):
                wait_for_answers(load, 32)
                lives = {rank: story.target.ranks()[rank].incarnation for rank in lost}
                for rank in lives:
                    story.kill(rank)
                assert story.wait_until_back(RANKS, lives), server.log[-3000:]
            wait_for_answers(load, 32)
        story.close()
        log = server.log
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    taken = [(int(had), int(needed)) for had, needed in re.findall(r"has (\d+) of (\d+) tokens from rank", log)]
    print(f"{len(load.answers)} answers; {len(taken)} contexts came along, {sum(had for had, _ in taken)} tokens")
    assert taken, "every context was computed again"


def test_in_bfloat16_lone_requests_go_on_alike(model: Path, mps: dict[str, str], tmp_path: Path) -> None:
    """Of a server in which every rank has every expert (:mod:`tests.sglang.test_bfloat16` says why)."""
    device = CUDA.caching()
    device = replace(device, flags=(*device.flags, "--dtype", "bfloat16"))
    flags = (*FOUR_RANKS, *SLOTS_FOR_ALL, *KEPT, "--eep-spares", "1")
    with serving(model, tmp_path, mps, *flags, device=device) as server:
        check_that_lone_requests_go_on_alike(server, RANKS, (60, 333, 1500, 3000))
