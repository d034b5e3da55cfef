"""Each family of models on a GPU: four ranks give the answers of one rank of stock SGLang, also while one is killed and its
experts come from its peers and from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.drill.devices import CUDA
from eep.drill.load import Load
from eep.drill.models.checkpoint import FAMILIES, make_model
from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server
from tests.gpu.sglang.conftest import serving
from tests.sglang.drills import Drilled, wait_for_answers

pytestmark = pytest.mark.timeout(900)
RANKS, TOKENS = 4, 32
# As the plugin has it: a layer with a window has the cache of any other layer.
ALONE = (*ONE_RANK, "--disable-hybrid-swa-memory")


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "qwen3"])
def test_four_ranks_answer_as_one_and_one_is_lost(family: str, mps: dict[str, str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", size=CUDA.model, family=family)
    with Server(model, ALONE, tmp_path / "one.log", device=CUDA) as alone:
        one = Drilled.of(alone, ranks=1, prompts=8, tokens=TOKENS, continued=True)
    assert alone.leftovers() == []
    (tmp_path / "four").mkdir()
    with serving(model, tmp_path / "four", mps, *FOUR_RANKS) as server:
        found = Load.with_reference(server.url, one.prompts, tokens=TOKENS).wanted
        assert [list(each) for each in found] == one.wanted
        together = Drilled(server, RANKS, one.prompts, one.wanted)
        story = together.story(clients=16)
        with story.load:
            wait_for_answers(story.load, 16)
            assert story.wait_until_noticed(story.kill(1))
            assert story.wait_until_all_run(RANKS), server.log[-3000:]
            wait_for_answers(story.load, 16)
        together.check(story)
        assert "from disk" in server.log
        assert "from peer" in server.log
