"""A server that loses one, two and three of its four ranks goes on without a mask: those that are left make room for experts;
on any device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eep import cli, faults
from eep.drill.load import Load
from eep.drill.story import Story
from tests.sglang.drills import Drilled, scrape, wait_for, wait_for_answers

RANKS = 4
MAKING_ROOM = ("--eep-on-lost-coverage", "make-room", "--eep-redundant-experts", "0")
"""Without redundant slots each loss needs room."""
POINTS = [point for point in faults.PLACES if point.startswith("room.")]


@dataclass(frozen=True)
class Roomy:
    drilled: Drilled

    def order(self, action: str, rank: int) -> None:
        assert cli.main(["rank", action, str(rank), "--dir", str(self.drilled.server.directory)]) == 0

    def given(self) -> dict[int, float]:
        """Bytes of its cache that each rank has given, where it has ever given any."""
        named = "eep_room_bytes{"
        found = {name: value for name, value in scrape(self.drilled.server).items() if name.startswith(named)}
        return {int(name.split('rank="')[1].split('"')[0]): value for name, value in found.items()}

    def check_that_three_of_four_may_go(self) -> None:
        """One after the other, and come back."""
        drilled, story, given = self.drilled, self.drilled.story(), list[float]()
        with story.load:
            wait_for_answers(story.load, 4)
            left = list(range(RANKS))
            for rank in (1, 2, 3):
                self.order("remove", rank)
                left.remove(rank)
                assert story.wait_until_run(left), drilled.server.log[-3000:]
                wait_for_answers(story.load, 6)
                given.append(self.given()[0])
            for rank in (2, 1, 3):
                self.order("launch", rank)
                left.append(rank)
                assert story.wait_until_run(sorted(left)), drilled.server.log[-3000:]
                wait_for_answers(story.load, 6)
                given.append(self.given()[0])
        drilled.check(story)
        assert "masked" not in drilled.server.log
        assert 0 < given[0] < given[1] < given[2], "the fewer there are, the more room each makes"
        assert given[2] > given[3] > given[4] > given[5] == 0, "and gives it back"

    def check_a_kill(self, point: str) -> None:
        """A rank is killed while it makes room or gives it back."""
        drilled, story = self.drilled, self.drilled.story()
        before = story.target.ranks()[2].incarnation
        story.target.arm(2, point, "kill")
        with story.load:
            story.kill(1)
            assert story.target.wait_until_fired(2, point, 240.0), f"never passed: {point}"
            wait_for(lambda: story.target.ranks()[2].incarnation > before, "the rank to be back")
            wait_for_answers(story.load, 6)
        drilled.check(story)
        assert story.target.armed() == []

    def check_that_used_rows_go(self) -> None:
        """Half of the cache goes while more requests than the other half has room for are on one rank."""
        drilled = self.drilled
        assert drilled.server.directory is not None
        load = Load(drilled.server.url, drilled.prompts, drilled.wanted, clients=40, ranks=1)
        story = Story(drilled.server.directory, load)
        with load:
            wait_for_answers(load, 40)
            for rank in (1, 2, 3):
                self.order("remove", rank)
            assert story.wait_until_run((0,)), drilled.server.log[-3000:]
            wait_for_answers(load, 60)
            for rank in (1, 2, 3):
                self.order("launch", rank)
            assert story.wait_until_all_run(RANKS), drilled.server.log[-3000:]
            wait_for_answers(load, 20)
        drilled.check(story)
        owed = [int(each) for each in re.findall(r"slots; (\d+) of them are still in use", drilled.server.log)]
        assert max(owed) > 0, "requests had tokens there"
        assert self.given()[0] == 0
