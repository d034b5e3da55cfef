"""A server whose experts move while clients stream, on any device.

Clients send other prompts than those of the last test, and only few: what gates pick is uneven, and changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from eep import cli, faults
from eep.drill.sglang_server import Server
from tests.sglang.drills import Drilled, read_status, wait_for, wait_for_answers

RANKS, PARTS = 4, 5
BALANCING = ("--enable-eplb", "--eplb-rebalance-num-iterations", "100", "--eep-staged-experts", "3")
POINTS = [point for point in faults.PLACES if point.startswith("balance.")]


@dataclass
class Balanced:
    drilled: Drilled
    part: int = 0

    @property
    def server(self) -> Server:
        return self.drilled.server

    def next_part(self) -> Drilled:
        """The server with a few of the prompts, and not those of last time."""
        whole, self.part = self.drilled, self.part + 1
        which = slice(self.part % PARTS, None, PARTS)
        return Drilled(whole.server, RANKS, whole.prompts[which], whole.wanted[which])

    def switches(self) -> int:
        return self.server.log.count("experts moved here; dose")

    def check_that_experts_move(self, capsys: pytest.CaptureFixture[str]) -> None:
        drilled = self.next_part()
        story = drilled.story()
        with story.load:
            wait_for(lambda: self.switches() >= RANKS, "all ranks switch")
            wait_for_answers(story.load, 10)
            capsys.readouterr()
            assert cli.main(["status", "--json", "--dir", str(self.server.directory)]) == 0
            shown = read_status(capsys.readouterr().out)["balance"]
        drilled.check(story)
        assert 0 < shown["worst_layer"] <= shown["balancedness"] <= 1
        assert shown["doses"] >= 1
        assert "experts brought in" not in self.server.log, "what moved was staged, and no view changed"

    def check_a_kill_while_they_move(self, point: str, rank: int) -> None:
        drilled = self.next_part()
        story = drilled.story()
        before = story.target.ranks()[rank].incarnation
        story.target.arm(rank, point, "kill")
        with story.load:
            assert story.target.wait_until_fired(rank, point, 240.0), f"never passed: {point}"
            assert story.wait_until_back(RANKS, {rank: before}, 240.0), self.server.log[-3000:]
            wait_for_answers(story.load, 10)
        drilled.check(story)
        assert story.target.armed() == []
