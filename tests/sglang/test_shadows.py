"""With room for two copies of every expert, a rank is killed and not one expert moves: the others serve in the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep import cli
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled, read_status, wait_for, wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS = 4
# Sixteen experts, 32 slots; and experts move meanwhile.
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-redundant-experts", "16", "--eep-shadow-copies", "on"),
    *("--enable-eplb", "--eplb-rebalance-num-iterations", "100"),
)


def test_a_rank_is_lost_and_no_expert_moves(
    sglang: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(model, ARGUMENTS, tmp_path / "log", directory=tmp_path / "d")
    with server:
        drilled = Drilled.of(server, RANKS)
        story = Drilled(server, RANKS, drilled.prompts[:2], drilled.wanted[:2]).story()
        with story.load:
            wait_for(lambda: server.log.count("experts moved here; dose") >= RANKS, "all ranks switch")
            wait_for_answers(story.load, 10)
        drilled.check(story)
        story = drilled.story()
        with story.load:
            for rank in (1, 0):
                capsys.readouterr()
                assert cli.main(["status", "--json", "--dir", str(tmp_path / "d")]) == 0
                margin = read_status(capsys.readouterr().out)["margin"]
                assert margin["any_ranks"] >= 1
                assert margin["ranks"] == [0, 1, 2, 3]
                assert story.wait_until_noticed(story.kill(rank))
                assert story.wait_until_all_run(RANKS), server.log[-3000:]
                wait_for_answers(story.load, 10)
        drilled.check(story)
        assert "experts brought in" not in server.log
    assert server.leftovers() == []
