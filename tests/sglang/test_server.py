"""The real server with four ranks says what one rank of stock SGLang says, by every endpoint, and leaves nothing behind."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.load import Load
from eep.drill.server import FOUR_RANKS, ONE_RANK, Server
from eep.drill.story import Story

pytestmark = pytest.mark.timeout(900)  # two servers are started, on a machine that may be busy

RANKS = 4
PROMPTS = [f"{'A rank was lost. ' * (number % 5)}Say {number}" for number in range(12)]


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    texts: list[str]
    leftovers: list[str]
    drill: Story | None = None
    """What clients saw of the loss of a rank, at the end."""


@pytest.fixture(scope="module")
def reference(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one rank says, without the plugin's flag."""
    with Server(model, ONE_RANK, tmp_path_factory.mktemp("one") / "log") as server:
        tokens = [server.generate(prompt) for prompt in PROMPTS]
        texts = [server.complete(prompt) for prompt in PROMPTS]
    return Answers(tokens, texts, server.leftovers())


@pytest.fixture(scope="module")
def four_ranks(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    place = tmp_path_factory.mktemp("four")
    server = Server(model, FOUR_RANKS, place / "log", directory=place / "d")
    with server, ThreadPoolExecutor(6) as clients:
        alone = [server.generate(prompt) for prompt in PROMPTS[:2]]
        tokens = list(clients.map(server.generate, PROMPTS))
        streamed = list(clients.map(server.generate_stream, PROMPTS))
        texts = list(clients.map(server.complete, PROMPTS))
        streamed_texts = list(clients.map(server.complete_stream, PROMPTS))
        story = lose_a_rank(server, place / "d")
    assert alone == tokens[:2]
    assert streamed == tokens
    assert streamed_texts == texts
    return Answers(tokens, texts, server.leftovers(), story)


def lose_a_rank(server: Server, directory: Path) -> Story:
    """Kill one of four under load, and wait until it is back. Slots are as many as there are when nobody says."""
    load = Load.with_reference(server.url, [list(prompt.encode()) for prompt in PROMPTS[:6]], clients=6)
    story = Story(directory, load)
    with load:
        time.sleep(1.0)
        fault = story.kill(1)
        assert story.wait_until_noticed(fault)
        assert story.wait_until_all_run(RANKS), server.log[-3000:]
        time.sleep(1.0)
    story.close()
    return story


def test_answers_differ_from_each_other(reference: Answers) -> None:
    """If they did not, equal answers would say nothing."""
    assert len({tuple(each) for each in reference.tokens}) == len(PROMPTS)


def test_four_ranks_answer_as_one_does(reference: Answers, four_ranks: Answers) -> None:
    assert four_ranks.tokens == reference.tokens
    assert four_ranks.texts == reference.texts


def test_the_loss_of_one_rank_is_covered_by_the_slots_that_there_are_by_default(four_ranks: Answers) -> None:
    story = four_ranks.drill
    assert story is not None
    assert story.load.answers
    assert [answer.problem for answer in story.load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []
    assert story.faults[0].rejoined is not None


def test_nothing_is_left_over(four_ranks: Answers) -> None:
    """One rank of stock SGLang leaves files in shared memory; the plugin removes them."""
    assert four_ranks.leftovers == []
