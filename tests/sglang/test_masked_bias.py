"""A model whose gate has a bias and groups is served without half of its experts, and as a whole again afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eep import cli
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from tests.sglang.drills import wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
# Each of two ranks has half of the experts and no room for more.
ARGUMENTS = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    *("--eep-redundant-experts", "0", "--eep-on-lost-coverage", "mask", "--eep-timeout-ms", "10000"),
)


def test_half_of_the_experts_serve_alone(sglang: None, tmp_path: Path) -> None:
    model, directory = make_model(tmp_path / "model", family="deepseek-v3"), tmp_path / "d"
    choose = random.Random(5)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(4)]
    server = Server(model, ARGUMENTS, tmp_path / "log", directory=directory)
    with server:
        whole = Load.with_reference(server.url, prompts).wanted
        story = Story(directory, Load(server.url, prompts, whole, 2))
        assert cli.main(["rank", "remove", "1", "--dir", str(directory)]) == 0
        wait_for(lambda: "experts are masked" in server.log, "experts to be masked")
        assert story.wait_until_all_run(1)
        degraded = Load.with_reference(server.url, prompts).wanted
        assert all(degraded), "every request is answered"
        assert degraded != whole, "and not by the whole model"
        assert cli.main(["rank", "launch", "1", "--dir", str(directory)]) == 0
        assert story.wait_until_all_run(2), server.log[-3000:]
        assert Load.with_reference(server.url, prompts).wanted == whole
        story.close()
    assert server.leftovers() == []
