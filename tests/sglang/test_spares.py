"""Spares of the real server are whole ranks: a lost rank is back as one of them, and answers as before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled, lives_of, wait_for, wait_for_answers
from tests.sglang.test_end import EndingServer, check_that_it_ends_while_processes_hang, serving

pytestmark = pytest.mark.timeout(900)
BEGINS = "a spare begins as incarnation"


@pytest.fixture(scope="module")
def spared(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndingServer]:
    """The last test ends it."""
    with serving(model, tmp_path_factory.mktemp("spared"), "--eep-spares", "2") as server:
        yield server


def test_lost_ranks_come_back_as_spares(spared: EndingServer) -> None:
    """Each as its own. One that is killed is replaced, and no rank notices."""
    assert spared.directory is not None
    target, drilled = Target(spared.directory), Drilled.of(spared, ranks=2)
    spares = target.wait_for_spares(2)
    before = target.ranks()
    os.kill(spares[0], signal.SIGKILL)
    wait_for(lambda: len(set(target.spares()) - {spares[0]}) == 2, "another spare")
    assert target.ranks() == before, "no rank was lost"
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load)
        for rank in (1, 0):
            waiting, lives = set(target.wait_for_spares(2)), lives_of(story, rank)
            story.kill(rank)
            assert story.wait_until_back(2, lives), spared.log[-3000:]
            assert target.ranks()[rank].pid in waiting
            wait_for_answers(story.load)
    drilled.check(story)
    assert spared.log.count(BEGINS) == 2


def test_a_server_with_spares_ends_when_it_is_told_to_while_its_ranks_and_its_controller_hang(
    spared: EndingServer,
) -> None:
    check_that_it_ends_while_processes_hang(spared, and_the_controller=True)


@pytest.mark.long
def test_spares_of_four_ranks_through_many_losses(
    sglang: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at once, ranks that have brought in experts since their spares were prepared, and spares that are killed while
    they begin: the next life is a new process then."""
    monkeypatch.setenv("EEP_WARM_UP", "1")  # as on a GPU
    flags = (*FOUR_RANKS, "--eep-spares", "4", "--eep-faults", "on", "--eep-timeout-ms", "10000")
    with Server(model, flags, tmp_path / "log", directory=tmp_path / "d") as server:
        target, drilled = Target(tmp_path / "d"), Drilled.of(server)
        target.wait_for_spares(4)
        story = drilled.story()
        with story.load:
            for lost in ((2,), (1,), (0, 3), (2,)):
                wait_for_answers(story.load)
                lives = lives_of(story, *lost)
                for rank in lost:
                    story.kill(rank)
                assert story.wait_until_back(4, lives), server.log[-3000:]
            assert server.log.count(BEGINS) == 5
            for point in ("spare.told", "spare.begun"):
                target.wait_for_spares(4)
                wait_for_answers(story.load)
                lives = lives_of(story, 1)
                target.arm(1, point, "kill")
                story.kill(1)
                assert target.wait_until_fired(1, point, 30.0)
                assert story.wait_until_back(4, lives), server.log[-3000:]
            wait_for_answers(story.load)
        drilled.check(story)
    assert server.leftovers() == []
