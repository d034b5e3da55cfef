"""Each family of models: one rank of SGLang gives the answers of transformers, and four ranks give those of one, also while
one is killed and its experts come from disk and from its peers.

Qwen3-MoE is not here: every other test serves it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.drill.load import Load
from eep.drill.models.checkpoint import FAMILIES, make_model
from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server
from tests.sglang.drills import Drilled, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS, TOKENS = 4, 24
# As the plugin has it: a layer with a window has the cache of any other layer.
ALONE = (*ONE_RANK, "--disable-hybrid-swa-memory")
TOGETHER = (*FOUR_RANKS, "--eep-timeout-ms", "10000")


def answers_of_transformers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        asked = torch.tensor([prompt])
        answer = loaded.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1
        )
        found.append(answer[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "qwen3"])
def test_four_ranks_answer_as_one(sglang: None, family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family=family)
    with Server(model, ALONE, tmp_path / "one.log") as alone:
        one = Drilled.of(alone, ranks=1, tokens=TOKENS, continued=True)
    assert one.wanted[:4] == answers_of_transformers(model, one.prompts[:4])
    server = Server(model, TOGETHER, tmp_path / "log", directory=tmp_path / "d")
    with server:
        found = Load.with_reference(server.url, one.prompts, tokens=TOKENS).wanted
        assert [list(each) for each in found] == one.wanted
        together = Drilled(server, RANKS, one.prompts, one.wanted)
        story = together.story()
        with story.load:
            wait_for_answers(story.load)
            assert story.wait_until_noticed(story.kill(1))
            assert story.wait_until_all_run(RANKS), server.log[-3000:]
            wait_for_answers(story.load)
        together.check(story)
        assert "KiB from disk" in server.log
        assert "KiB from peer" in server.log
        assert "this life takes over the weights of life 0" in server.log
    assert server.leftovers() == []
