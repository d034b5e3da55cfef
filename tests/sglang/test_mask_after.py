"""A server whose disk is slow serves at once without the experts that only a lost rank had, and brings them in behind.

Answers before the loss, and those begun when all is there again, are exact and bear no mark. Those between are marked.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep import cli, faults
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from tests.sglang.drills import Drilled, scrape, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS, TOKENS = 4, 24
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", "--enable-metrics"),
    *("--eep-on-lost-coverage", "mask", "--eep-mask-after-ms", "50"),
)
SLOW = {"EEP_DISK_MS": "700"}
WITHOUT, WHOLE = "bring in behind their steps", "no expert is masked any more"
POINTS = [point for point in faults.PLACES if point.startswith("behind.")]


@dataclass
class Masked:
    drilled: Drilled

    @property
    def server(self) -> Server:
        return self.drilled.server

    def ask(self, which: int, tokens: int = TOKENS) -> tuple[list[int], bool]:
        """The answer to a prompt, and whether it is marked."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": self.drilled.prompts[which], "sampling_params": sampling}
        asked = urllib.request.Request(
            f"{self.server.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=200) as reply:
            answer = json.load(reply)
        return list(answer["output_ids"]), bool(answer["meta_info"].get("eep_masked", False))

    def rank(self, action: str, rank: int) -> None:
        assert cli.main(["rank", action, str(rank), "--dir", str(self.server.directory)]) == 0

    def since(self, before: int) -> str:
        return self.server.log[before:]

    def check_exact(self) -> None:
        for which, wanted in enumerate(self.drilled.wanted):
            assert self.ask(which) == (wanted, False)


@pytest.fixture(scope="module")
def masked(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Masked]:
    place = tmp_path_factory.mktemp("masked")
    server = Server(model, ARGUMENTS, place / "log", SLOW, place / "d")
    with server:
        yield Masked(Drilled.of(server, RANKS, prompts=4, tokens=TOKENS))
    assert server.leftovers() == []


def test_masked_at_once_and_whole_when_the_disk_has_delivered(masked: Masked) -> None:
    story = masked.drilled.story()
    masked.check_exact()
    before, long_answer = len(masked.server.log), []
    begun_before = threading.Thread(target=lambda: long_answer.append(masked.ask(0, tokens=400)))
    begun_before.start()
    masked.rank("remove", 1)
    wait_for(lambda: WITHOUT in masked.since(before), "experts to be masked")
    _, is_marked = masked.ask(1, tokens=4)
    assert WHOLE not in masked.since(before), "the disk is slower than that"
    assert is_marked
    wait_for(lambda: masked.since(before).count(WHOLE) == RANKS - 1, "all experts to be there")
    masked.check_exact()
    begun_before.join(200)
    assert long_answer[0][1], "what it has in the cache was computed without some experts"
    masked.rank("launch", 1)
    assert story.wait_until_all_run(RANKS), masked.server.log[-3000:]
    masked.check_exact()
    assert scrape(masked.server)["eep_masked_requests_total"] >= 2
    story.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_it_brings_in_what_is_missing(masked: Masked, point: str) -> None:
    story: Story = masked.drilled.story()
    life = story.target.ranks()[2].incarnation
    story.target.arm(2, point, "kill")
    before = len(masked.server.log)
    masked.rank("remove", 1)
    assert story.target.wait_until_fired(2, point, 240.0), f"never passed: {point}\n{masked.since(before)[-3000:]}"
    wait_for(lambda: story.target.ranks()[2].incarnation > life, "the rank to be back")
    masked.ask(0, tokens=4)
    wait_for(lambda: masked.since(before).count(WHOLE) >= RANKS - 2, "all experts to be there")
    wait_for(lambda: masked.ask(1, tokens=4)[1] is False, "answers without a mark")
    masked.check_exact()
    masked.rank("launch", 1)
    assert story.wait_until_all_run(RANKS), masked.server.log[-3000:]
    masked.check_exact()
    assert story.target.armed() == []
    story.close()
