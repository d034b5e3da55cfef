"""A model whose experts are in fp8, served in bfloat16: its tokens cross ranks in fp8, and four ranks find a text as likely
as one rank does. Tokens are not compared: in bfloat16 they depend on the batch, with one rank too.

With DeepGEMM the tokens of decode steps cross by expert. It is run where the package is (sgl-deep-gemm, in the version that
SGLang pins), and compiles kernels with nvcc."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import urllib.request
from pathlib import Path

import pytest

from eep.drill.devices import CUDA
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server
from eep.drill.story import Story
from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import wait_for_answers

pytestmark = pytest.mark.timeout(900)
BFLOAT16 = ("--dtype", "bfloat16")
COMPILES_WHEN_NEEDED = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
"""Before the server is ready, DeepGEMM would compile a kernel for every number of tokens that there may be."""
FORMS = {
    "triton": "tokens cross ranks as fp8 by rank",
    "deep_gemm": "tokens cross ranks as bf16 by rank, fp8 by expert",
}
"""What the log says, by the kernels of the experts."""


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    choose = random.Random(5)
    return [[choose.randrange(3, 250) for _ in range(64)] for _ in range(8)]


@pytest.fixture(scope="module")
def fp8_model(sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "fp8", size=CUDA.model, fp8=True)


def likelihoods(server: Server, text: list[int]) -> list[float]:
    """Of each token of the text after the first."""
    body = {
        **{"input_ids": text, "sampling_params": {"temperature": 0, "max_new_tokens": 1}},
        **{"return_logprob": True, "logprob_start_len": 0},
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [float(each[0]) for each in json.load(answer)["meta_info"]["input_token_logprobs"][1:]]


@pytest.fixture(scope="module")
def alone(fp8_model: Path, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The likelihoods that one rank finds, with Triton's kernels."""
    log = tmp_path_factory.mktemp("one") / "log"
    with Server(fp8_model, (*ONE_RANK, *BFLOAT16), log, COMPILES_WHEN_NEEDED, device=CUDA) as server:
        found = [each for text in texts for each in likelihoods(server, text)]
    assert server.leftovers() == []
    return found


@pytest.mark.parametrize(
    "kernels",
    [
        "triton",
        pytest.param(
            "deep_gemm",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("deep_gemm") is None, reason="the package deep_gemm is not installed"
            ),
        ),
    ],
)
def test_four_ranks_find_a_text_as_likely_as_one_does_and_one_is_lost(
    fp8_model: Path,
    texts: list[list[int]],
    alone: list[float],
    mps: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    kernels: str,
) -> None:
    flags = (*FOUR_RANKS, *BFLOAT16, "--moe-runner-backend", kernels)
    with serving(fp8_model, tmp_path_factory.mktemp("four"), {**mps, **COMPILES_WHEN_NEEDED}, *flags) as server:
        assert FORMS[kernels] in server.log
        together = [each for text in texts for each in likelihoods(server, text)]
        assert server.directory is not None
        story = Story(server.directory, Load(server.url, texts, [[0] * 48] * len(texts), clients=16))
        with story.load:
            wait_for_answers(story.load, 16)
            assert story.wait_until_noticed(story.kill(2))
            assert story.wait_until_all_run(4), server.log[-3000:]
            wait_for_answers(story.load)
        story.close()
        afterwards = [each for text in texts for each in likelihoods(server, text)]
    assert story.load.answers
    assert [answer.problem for answer in story.load.failed] == []
    assert {len(answer.tokens) for answer in story.load.answers} == {48}
    spread = statistics.stdev(alone)
    for name, found in (("before", together), ("after", afterwards)):
        apart = statistics.median(abs(mine - theirs) for mine, theirs in zip(alone, found, strict=True))
        print(f"{name} the loss: {apart:.4f} nats apart, of likelihoods that spread by {spread:.2f}")
        assert apart < 0.1 * spread
