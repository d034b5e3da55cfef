"""The real server with its prefix cache on, which other servers of the tests do without. It may hold only what the whole
model computes: nothing that a rank computed alone before it joined, and nothing of a step that a loss cut short."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eep.drill.devices import CPU
from eep.drill.load import Load, ask
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from sglang_patches.rank.warm_up import ASKED_FOR
from tests.sglang.drills import wait_for_answers

pytestmark = pytest.mark.timeout(900)  # a server is started, on a machine that may be busy

RANKS, TOKENS = 4, 16
PART, PARTS = 64, 3
IN_PARTS = ("--chunked-prefill-size", str(RANKS * PART))
"""SGLang divides it among the ranks."""
LONG_ANSWER = 100
"""Most of the time of such a request goes into its answer: that is where a kill finds it."""
AS_IN_WARMING_UP = [[first, *[1] * ones] for first, ones in ((1, 1), (2, 2), (3, 14), (4, 15), (7, 30), (20, 6))]
"""Prompts that begin as those do with which a rank warms up."""


@pytest.fixture(scope="module")
def caching(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the slots that are there by default, so that a rank alone cannot reach all experts."""
    place = tmp_path_factory.mktemp("caching")
    arguments = (*FOUR_RANKS, *IN_PARTS, "--eep-timeout-ms", "10000", "--eep-faults", "on")
    server = Server(model, arguments, place / "log", {ASKED_FOR: "1"}, directory=place / "d", device=CPU.caching())
    with server:
        yield server
    assert server.leftovers() == []


@pytest.fixture(scope="module")
def network(model: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def by_itself(network: Any, prompt: list[int]) -> list[int]:
    """The greedy answer of the model as transformers computes it."""
    whole = network.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    answer: list[int] = whole[0, len(prompt) :].tolist()
    return answer


def wanted(network: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [by_itself(network, prompt) for prompt in prompts]


def test_nothing_of_warming_up_is_found_in_the_cache(caching: Server, network: Any) -> None:
    load = Load.with_reference(caching.url, AS_IN_WARMING_UP, tokens=TOKENS, ranks=RANKS)
    assert load.wanted == wanted(network, AS_IN_WARMING_UP)


def test_a_request_that_moves_takes_its_context_along(caching: Server) -> None:
    assert caching.directory is not None
    choose = random.Random(7)
    prompts = [[choose.randrange(256) for _ in range(length)] for length in (90, 130, 210, 300, 330, 410)]
    load = Load.with_reference(caching.url, prompts, tokens=LONG_ANSWER, ranks=RANKS)
    story = Story(caching.directory, load)
    with load:
        for rank in (2, 1):
            wait_for_answers(load)
            # Just after an answer the next request has only begun: its rank dies some steps later.
            story.target.arm(rank, "kv.journal", "kill", skip=LONG_ANSWER // 2)
            assert story.target.wait_until_fired(rank, "kv.journal", 120.0)
            assert story.wait_until_all_run(RANKS), caching.log[-3000:]
        wait_for_answers(load)
    story.close()
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    taken = [(int(had), int(needed)) for had, needed in re.findall(r"has (\d+) of (\d+) tokens from rank", caching.log)]
    assert taken, "every context was computed again"
    assert all(had <= needed - 1 for had, needed in taken)


def test_a_prompt_that_moves_takes_its_computed_parts_along(caching: Server, network: Any) -> None:
    assert caching.directory is not None
    choose = random.Random(11)
    prompt = [choose.randrange(256) for _ in range(2 * PARTS * PART)]
    story = Story(caching.directory, Load(caching.url, [], []))
    assert story.wait_until_all_run(RANKS)
    story.target.arm(2, "kv.journal", "kill", skip=PARTS)
    answer = ask(caching.url, prompt, TOKENS, rank=2)
    assert story.target.wait_until_fired(2, "kv.journal", 1.0)
    assert (answer.problem, answer.tokens) == ("", by_itself(network, prompt))
    assert f"has {PARTS * PART} of {len(prompt)} tokens from rank 2" in caching.log
    assert story.wait_until_all_run(RANKS), caching.log[-3000:]
    story.close()


@pytest.mark.long
@pytest.mark.parametrize("point", ["kv.journal", "kv.restore.before", "kv.restore.after"])
def test_a_rank_is_killed_at_a_point_of_a_restore(caching: Server, point: str) -> None:
    """Rank 0 has to take a request over for that, so others are killed until it does."""
    assert caching.directory is not None
    choose = random.Random(point)
    prompts = [[choose.randrange(256) for _ in range(length)] for length in (60, 90, 150, 200)]
    load = Load.with_reference(caching.url, prompts, tokens=LONG_ANSWER, ranks=RANKS)
    story = Story(caching.directory, load)
    assert story.wait_until_all_run(RANKS)
    with load:
        wait_for_answers(load)
        story.target.arm(0, point, "kill")
        for victim in (1, 2, 3, 1, 2, 3):
            if point != "kv.journal":
                story.kill(victim)
            if story.target.wait_until_fired(0, point, 20.0):
                break
            assert story.wait_until_all_run(RANKS), caching.log[-3000:]
        else:
            pytest.fail(f"rank 0 never passed {point}")
        assert story.wait_until_all_run(RANKS), caching.log[-3000:]
        wait_for_answers(load)
    story.close()
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []


@pytest.mark.long
def test_a_rank_is_killed_in_the_middle_of_a_copy(caching: Server, network: Any) -> None:
    """Of a prompt that rank 0 does not know: it would copy nothing."""
    assert caching.directory is not None
    choose = random.Random(13)
    story = Story(caching.directory, Load(caching.url, [], []))
    assert story.wait_until_all_run(RANKS)
    story.target.arm(0, "kv.restore.mid", "kill")
    for _ in range(6):
        prompt = [choose.randrange(256) for _ in range(2 * PART)]
        story.target.arm(1, "kv.journal", "kill", skip=2 + TOKENS // 2)
        answer = ask(caching.url, prompt, TOKENS, rank=1)
        assert (answer.problem, answer.tokens) == ("", by_itself(network, prompt))
        assert story.wait_until_all_run(RANKS), caching.log[-3000:]
        if story.target.wait_until_fired(0, "kv.restore.mid", 0.0):
            break
    else:
        pytest.fail("rank 0 never copied a context")
    story.close()


def test_conversations_go_on_from_the_cache_through_kills(caching: Server, network: Any) -> None:
    """Each prompt goes on from the answer to the one before, and several begin alike."""
    assert caching.directory is not None
    turns: list[list[int]] = []
    for number in range(4):
        prompt = [*b"A rank was lost. ", 60 + number]
        for _ in range(3):
            turns.append(prompt)
            prompt = [*prompt, *by_itself(network, prompt), 70 + number]
    load = Load(caching.url, turns, wanted(network, turns), clients=6)
    story = Story(caching.directory, load)
    with load:
        for rank in (1, 3, 0):
            wait_for_answers(load)
            assert story.wait_until_noticed(story.kill(rank))
            assert story.wait_until_all_run(RANKS), caching.log[-3000:]
        wait_for_answers(load)
    story.close()
    assert len(load.answers) > len(turns)
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    assert re.search(r"#cached-token: [1-9]", caching.log), "nothing was found in the cache"
