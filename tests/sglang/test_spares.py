"""A spare of the real server is killed: it is replaced, the ranks do not notice, and the next lost rank takes a spare."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.drills import wait_for
from tests.sglang.test_end import TWO_RANKS

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_spare_that_is_killed_is_replaced(sglang: None, model: Path, tmp_path: Path) -> None:
    with Server(model, (*TWO_RANKS, "--eep-spares", "1"), tmp_path / "log", directory=tmp_path / "d") as server:
        target = Target(tmp_path / "d")
        wanted = server.generate("Say 1")
        (first,) = target.wait_for_spares(1)
        before = target.ranks()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: target.spares() not in ([], [first]), "another spare")
        assert target.ranks() == before, "no rank was lost"
        assert server.generate("Say 1") == wanted
        (second,) = target.spares()
        target.kill(1)
        wait_for(lambda: target.ranks()[1].pid == second, "the spare becomes the rank")
        wait_for(lambda: target.ranks()[1].is_in, "the rank is in")
        assert server.generate("Say 1") == wanted
    assert server.leftovers() == []
