"""What goes wrong with spares of the real server ends at worst as it did without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.drills import Drilled, lives_of, wait_for_answers
from tests.sglang.server_processes import KEEPER, kill, wait_for_next
from tests.sglang.test_end import TWO_RANKS
from tests.sglang.test_spares import BEGINS

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_second_spare_takes_over_from_one_that_is_killed(sglang: None, model: Path, tmp_path: Path) -> None:
    flags = (*TWO_RANKS, "--eep-spares", "4", "--eep-faults", "on", "--eep-timeout-ms", "10000")
    with Server(model, flags, tmp_path / "log", directory=tmp_path / "d") as server:
        target, drilled = Target(tmp_path / "d"), Drilled.of(server, ranks=2)
        story = drilled.story()
        with story.load:
            for number, point in enumerate(("spare.told", "spare.begun"), 1):
                waiting = set(target.wait_for_spares(4))
                assert len(waiting) == 4, server.log[-3000:]
                wait_for_answers(story.load)
                lives = lives_of(story, 1)
                target.arm(1, point, "kill")
                story.kill(1)
                assert target.wait_until_fired(1, point, 30.0)
                assert story.wait_until_back(2, lives), server.log[-3000:]
                assert target.ranks()[1].pid in waiting
                assert server.log.count(BEGINS) == number
            wait_for_answers(story.load)
        drilled.check(story)
    assert server.leftovers() == []


def test_ranks_come_back_after_the_keeper_was_killed(sglang: None, model: Path, tmp_path: Path) -> None:
    """It holds the memory of ranks. The next one is given it by the ranks that live."""
    flags = (*TWO_RANKS, "--eep-spares", "2", "--eep-timeout-ms", "10000")
    with Server(model, flags, tmp_path / "log", directory=tmp_path / "d") as server:
        target, drilled = Target(tmp_path / "d"), Drilled.of(server, ranks=2)
        story = drilled.story()
        with story.load:
            assert len(target.wait_for_spares(2)) == 2, server.log[-3000:]
            wait_for_next(server, KEEPER, kill(server, KEEPER))
            for rank in (0, 1):
                wait_for_answers(story.load)
                lives = lives_of(story, rank)
                story.kill(rank)
                assert story.wait_until_back(2, lives), server.log[-3000:]
            wait_for_answers(story.load)
        drilled.check(story)
    assert server.leftovers() == []
