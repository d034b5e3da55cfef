"""By every endpoint, the real server with four ranks answers as the model does by itself, and as one rank of stock SGLang
does."""

from __future__ import annotations

import importlib
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eep.drill.faults import Target
from eep.drill.load import Load
from eep.drill.sglang_server import ONE_RANK, Server
from eep.drill.story import Story
from tests.sglang.drills import wait_for, wait_for_answers

pytestmark = pytest.mark.timeout(900)  # two servers are started, on a machine that may be busy

RANKS = 4
PROMPTS = [f"{'A rank was lost. ' * (number % 5)}Say {number}" for number in range(8)]


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    texts: list[str]


@pytest.fixture(scope="module")
def reference(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one rank says, without the plugin's flag."""
    with Server(model, ONE_RANK, tmp_path_factory.mktemp("one") / "log") as server:
        answers = Answers(
            [server.generate(prompt) for prompt in PROMPTS], [server.complete(prompt) for prompt in PROMPTS]
        )
    assert server.leftovers() == []
    return answers


@pytest.fixture(scope="module")
def four_ranks(plain: Server) -> Answers:
    with ThreadPoolExecutor(6) as clients:
        alone = [plain.generate(prompt) for prompt in PROMPTS[:2]]
        tokens = list(clients.map(plain.generate, PROMPTS))
        streamed = list(clients.map(plain.generate_stream, PROMPTS))
        texts = list(clients.map(plain.complete, PROMPTS))
        streamed_texts = list(clients.map(plain.complete_stream, PROMPTS))
    assert alone == tokens[:2]
    assert streamed == tokens
    assert streamed_texts == texts
    return Answers(tokens, texts)


@pytest.fixture(scope="module")
def by_itself(model: Path) -> list[list[int]]:
    """The greedy answers of the model as transformers computes them, without any server."""
    transformers: Any = importlib.import_module("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        whole = network.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        answers.append(whole[0, len(ids) :].tolist())
    return answers


def test_answers_differ_from_each_other(by_itself: list[list[int]]) -> None:
    """If they did not, equal answers would say nothing."""
    assert len({tuple(each) for each in by_itself}) == len(PROMPTS)


def test_four_ranks_answer_as_the_model_does(by_itself: list[list[int]], four_ranks: Answers) -> None:
    assert four_ranks.tokens == by_itself


@pytest.mark.long
def test_four_ranks_answer_as_one_does(reference: Answers, four_ranks: Answers) -> None:
    assert four_ranks.tokens == reference.tokens
    assert four_ranks.texts == reference.texts


@pytest.mark.parametrize(
    ("path", "order", "why"),
    [
        ("/update_weights_from_disk", {"model_path": "elsewhere"}, "Start another server"),
        ("/release_memory_occupation", {}, "Start another server"),
        ("/weights_checker", {"action": "checksum"}, "cannot be compared"),
        ("/start_expert_distribution_record", {}, "outside of steps"),
        ("/dump_expert_distribution_record", {}, "outside of steps"),
        ("/pause_generation", {"mode": "in_place"}, "for lost"),
    ],
)
def test_orders_that_would_make_ranks_differ_are_refused(
    plain: Server, path: str, order: dict[str, str], why: str
) -> None:
    code, said = refusal_of(plain, path, order)
    assert code == 400
    assert why in said


def refusal_of(server: Server, path: str, order: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        server.url + path, json.dumps(order).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=600)
    return refused.value.code, refused.value.read().decode()


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"max_new_tokens": 16.0}, "max_new_tokens"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"top_k": 10**25}, ""),
    ],
)
def test_a_parameter_of_the_wrong_type_is_an_error_to_its_client_alone(
    plain: Server, four_ranks: Answers, parameters: dict[str, Any], why: str
) -> None:
    code, said = refusal_of(plain, "/generate", {"text": "Say 1", "sampling_params": parameters})
    assert code == 400, said
    assert why in said
    assert plain.generate(PROMPTS[0]) == four_ranks.tokens[0]


FORBIDS_TOKENS = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
"""The pickle of a class of SGLang's by its name. It forbids the tokens that it is given, whether there are such or not."""


def test_a_request_with_which_two_ranks_fail_is_ended_itself(plain: Server, four_ranks: Answers) -> None:
    """The front end cannot know what code of a client does. Each rank ends with an IndexError."""
    assert plain.directory is not None
    target = Target(plain.directory)
    before = sum(rank.incarnation for rank in target.ranks().values())
    order = {
        "text": "Say 1",
        "sampling_params": {"temperature": 0, "custom_params": {"token_ids": [10**6]}},
        "custom_logit_processor": json.dumps({"callable": FORBIDS_TOKENS.hex()}),
    }
    code, said = refusal_of(plain, "/generate", order)
    assert code == 500, said
    assert "an exception ended each of the last two ranks" in said
    wait_for(lambda: all(rank.is_in for rank in target.ranks().values()), "all ranks are back")
    assert sum(rank.incarnation for rank in target.ranks().values()) == before + 2
    assert plain.generate(PROMPTS[0]) == four_ranks.tokens[0]


def test_a_health_check_is_answered(plain: Server) -> None:
    with urllib.request.urlopen(f"{plain.url}/health_generate", timeout=60) as answer:
        assert answer.status == 200


def test_the_loss_of_one_rank_is_covered_by_the_slots_that_there_are_by_default(plain: Server) -> None:
    assert plain.directory is not None
    load = Load.with_reference(plain.url, [list(prompt.encode()) for prompt in PROMPTS[:6]], clients=6)
    story = Story(plain.directory, load)
    with load:
        wait_for_answers(load)
        fault = story.kill(1)
        assert story.wait_until_noticed(fault)
        assert story.wait_until_all_run(RANKS), plain.log[-3000:]
        wait_for_answers(load)
    story.close()
    assert load.answers
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    assert story.faults[0].rejoined is not None
