"""A server of two ranks grows to four and shrinks again while clients stream: no request fails, and every token is right."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep import cli
from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from sglang_patches.rank import warm_up
from tests.sglang.drills import wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

# The two at the start have room for one copy of each expert, so that experts must move when one of them leaves.
GROWING = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    *("--eep-max-ranks", "4", "--eep-redundant-experts", "0", "--eep-timeout-ms", "20000"),
)


@dataclass
class Grown:
    server: Server
    directory: Path
    load: Load

    @contextmanager
    def under_load(self) -> Iterator[Story]:
        """Clients that stream meanwhile. In the end nothing has failed and nothing was wrong."""
        story = Story(self.directory, Load(self.load.url, self.load.prompts, self.load.wanted, clients=6))
        with story.load:
            wait_for_answers(story.load)
            yield story
            wait_for_answers(story.load)
        story.close()
        assert story.load.answers
        assert [answer.problem for answer in story.load.failed] == []
        assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []

    def ask(self, action: str, rank: int) -> int:
        return cli.main(["rank", action, str(rank), "--dir", str(self.directory)])

    def asked(self) -> int:
        """How many ranks answer a question that SGLang asks of all."""
        with urllib.request.urlopen(f"{self.server.url}/server_info", timeout=60) as answer:
            return len(json.load(answer)["internal_states"])

    def run_with(self, story: Story, *ranks: int) -> None:
        assert story.wait_until_run(ranks), self.server.log[-3000:]


@pytest.fixture(scope="module")
def grown(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grown]:
    place = tmp_path_factory.mktemp("scale")
    choose = random.Random(5)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(10)]
    # As on a GPU, every rank of this server warms up before it joins.
    server = Server(model, GROWING, place / "log", {warm_up.ASKED_FOR: "1"}, directory=place / "d")
    with server:
        yield Grown(server, place / "d", Load.with_reference(server.url, prompts))
    assert server.leftovers() == []


def test_ranks_have_warmed_up(grown: Grown) -> None:
    """With prompts that no client has sent, one of them longer than a chunk; nothing of them has left the rank."""
    lines = [line for line in grown.server.log.splitlines() if "Prefill batch" in line]
    for rank in (0, 1):
        assert any(f"DP{rank} " in line and "#new-seq: 8, #new-token: 64" in line for line in lines)
    assert "eep-warm-up" not in grown.server.log


def test_it_grows_while_it_serves(grown: Grown) -> None:
    with grown.under_load() as story:
        grown.run_with(story, 0, 1)
        assert len(story.target.ranks()) == 4, "the others are known, and are not started"
        assert [rank.pid for rank in story.target.ranks().values()].count(None) == 2
        assert grown.asked() == 2
        for rank in (2, 3):
            assert grown.ask("launch", rank) == 0
            grown.run_with(story, *range(rank + 1))
    assert grown.asked() == 4
    assert "experts brought in" not in grown.server.log, "a rank that joins has loaded what it is to hold"


def test_the_new_ranks_get_requests(grown: Grown) -> None:
    log = len(grown.server.log)
    with grown.under_load() as story:
        grown.run_with(story, 0, 1, 2, 3)
    for rank in range(4):
        assert f"DP{rank} TP{rank} EP{rank}] Prefill batch" in grown.server.log[log:]


def test_there_is_no_rank_beyond_the_most(grown: Grown, capsys: pytest.CaptureFixture[str]) -> None:
    assert grown.ask("launch", 4) == 1
    assert "there is room for 4 ranks, 0 to 3" in capsys.readouterr().err


def test_a_new_rank_that_is_killed_comes_back(grown: Grown) -> None:
    with grown.under_load() as story:
        fault = story.kill(2)
        assert story.wait_until_noticed(fault)
        grown.run_with(story, 0, 1, 2, 3)


def test_ranks_leave_under_load(grown: Grown) -> None:
    """What they held moves to those that stay, and so do their requests."""
    with grown.under_load() as story:
        for rank, staying in ((0, (1, 2, 3)), (2, (1, 3))):
            assert grown.ask("remove", rank) == 0
            grown.run_with(story, *staying)
    assert "experts brought in" in grown.server.log


def test_those_that_are_needed_stay(grown: Grown, capsys: pytest.CaptureFixture[str]) -> None:
    assert grown.ask("remove", 3) == 1
    assert "1 would stay, and 2 are needed" in capsys.readouterr().err


def test_it_is_as_it_was_again(grown: Grown) -> None:
    with grown.under_load() as story:
        for rank in (0, 2):
            assert grown.ask("launch", rank) == 0
        grown.run_with(story, 0, 1, 2, 3)
        for rank in (2, 3):
            assert grown.ask("remove", rank) == 0
        grown.run_with(story, 0, 1)
