"""The real server with four ranks says what one rank of stock SGLang says, by every endpoint, and leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.server import FOUR_RANKS, ONE_RANK, Server

pytestmark = pytest.mark.timeout(900)  # two servers are started, on a machine that may be busy

PROMPTS = [f"{'A rank was lost. ' * (number % 5)}Say {number}" for number in range(12)]


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    texts: list[str]
    leftovers: list[str]


@pytest.fixture(scope="module")
def reference(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one rank says, without the plugin's flag."""
    with Server(model, ONE_RANK, tmp_path_factory.mktemp("one") / "log") as server:
        tokens = [server.generate(prompt) for prompt in PROMPTS]
        texts = [server.complete(prompt) for prompt in PROMPTS]
    return Answers(tokens, texts, server.leftovers())


@pytest.fixture(scope="module")
def four_ranks(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    with Server(model, FOUR_RANKS, tmp_path_factory.mktemp("four") / "log") as server, ThreadPoolExecutor(6) as clients:
        alone = [server.generate(prompt) for prompt in PROMPTS[:2]]
        tokens = list(clients.map(server.generate, PROMPTS))
        streamed = list(clients.map(server.generate_stream, PROMPTS))
        texts = list(clients.map(server.complete, PROMPTS))
        streamed_texts = list(clients.map(server.complete_stream, PROMPTS))
    assert alone == tokens[:2]
    assert streamed == tokens
    assert streamed_texts == texts
    return Answers(tokens, texts, server.leftovers())


def test_answers_differ_from_each_other(reference: Answers) -> None:
    """If they did not, equal answers would say nothing."""
    assert len({tuple(each) for each in reference.tokens}) == len(PROMPTS)


def test_four_ranks_answer_as_one_does(reference: Answers, four_ranks: Answers) -> None:
    assert four_ranks.tokens == reference.tokens
    assert four_ranks.texts == reference.texts


def test_nothing_is_left_over(four_ranks: Answers) -> None:
    """One rank of stock SGLang leaves files in shared memory; the plugin removes them."""
    assert four_ranks.leftovers == []
