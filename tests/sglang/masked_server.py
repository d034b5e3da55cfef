"""A server whose disk is slow serves at once without the experts that only a lost rank had, and brings them in behind; on any
device."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import dataclass

from eep import cli, faults
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from tests.sglang.drills import Drilled, scrape, wait_for

RANKS, TOKENS = 4, 24
MASKING = ("--eep-on-lost-coverage", "mask", "--eep-mask-after-ms", "50")
SLOW = {"EEP_DISK_MS": "700"}
WITHOUT, WHOLE = "bring in behind their steps", "no expert is masked any more"
POINTS = [point for point in faults.PLACES if point.startswith("behind.")]


@dataclass
class Masked:
    drilled: Drilled
    long: int = 400
    """Tokens of an answer that takes longer than a loss is noticed in."""

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

    def check_a_loss(self) -> None:
        """Masked at once, and whole when the disk has delivered."""
        story = self.drilled.story()
        self.check_exact()
        before, long_answer = len(self.server.log), []
        begun_before = threading.Thread(target=lambda: long_answer.append(self.ask(0, tokens=self.long)))
        begun_before.start()
        self.rank("remove", 1)
        wait_for(lambda: WITHOUT in self.since(before), "experts to be masked")
        _, is_marked = self.ask(1, tokens=4)
        assert WHOLE not in self.since(before), "the disk is slower than that"
        assert is_marked
        wait_for(lambda: self.since(before).count(WHOLE) == RANKS - 1, "all experts to be there")
        self.check_exact()
        begun_before.join(200)
        assert long_answer[0][1], "what it has in the cache was computed without some experts"
        self.rank("launch", 1)
        assert story.wait_until_all_run(RANKS), self.server.log[-3000:]
        self.check_exact()
        assert scrape(self.server)["eep_masked_requests_total"] >= 2
        story.close()

    def check_a_kill_behind(self, point: str) -> None:
        """A rank is killed while it brings in what is missing."""
        story: Story = self.drilled.story()
        life = story.target.ranks()[2].incarnation
        story.target.arm(2, point, "kill")
        before = len(self.server.log)
        self.rank("remove", 1)
        assert story.target.wait_until_fired(2, point, 240.0), f"never passed: {point}\n{self.since(before)[-3000:]}"
        wait_for(lambda: story.target.ranks()[2].incarnation > life, "the rank to be back")
        self.ask(0, tokens=4)
        wait_for(lambda: self.since(before).count(WHOLE) >= RANKS - 2, "all experts to be there")
        wait_for(lambda: self.ask(1, tokens=4)[1] is False, "answers without a mark")
        self.check_exact()
        self.rank("launch", 1)
        assert story.wait_until_all_run(RANKS), self.server.log[-3000:]
        self.check_exact()
        assert story.target.armed() == []
        story.close()
