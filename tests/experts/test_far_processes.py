"""Ranks on two hosts, as processes: a rank is killed, a whole host, and what is lost comes from the other one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.control.harness import wait_until_all_threads_stand_still
from tests.experts import model
from tests.experts.far_ranks import far_ranks, why_not

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")
_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

SLOTS = 4
EACH = SLOTS * model.LAYERS
"""How many experts a rank holds: all ranks together hold each twice."""


def test_a_host_is_lost_and_fills_up_from_the_other(tmp_path: Path) -> None:
    with far_ranks(tmp_path, SLOTS) as group:
        group.start(0, 1, 2, 3)
        assert group.enter(0, 1, 2, 3) == {rank: {} for rank in range(4)}
        group.kill(3)
        assert group.enter(0, 1, 2) == {0: {}, 1: {}, 2: {}}
        group.kill(2)
        assert group.enter(0, 1) == {0: {}, 1: {}}, "the other host has every expert"
        group.start(2, 3, empty=True)
        assert group.enter(0, 1, 2, 3) == {0: {}, 1: {}, 2: {"far peer": EACH}, 3: {"far peer": EACH}}
        # What came is passed on: the host that was there is lost.
        group.kill(0, 1)
        assert group.enter(2, 3) == {2: {}, 3: {}}


def test_what_no_rank_has_comes_from_the_backup_of_another_host(tmp_path: Path) -> None:
    with far_ranks(tmp_path, slots=3) as group:
        group.start_backup("b")
        group.start(0, 1, 2, 3, backup=True)
        group.ask(0, "await_backup")
        group.enter(0, 1, 2, 3)
        group.kill(0)
        moved = group.enter(1, 2, 3)
        assert moved[1].get("far dram"), moved
        assert not any(moved[rank].get("far dram") for rank in (2, 3)), "it is the backup of their own host"


def test_a_rank_that_stands_still_or_is_cut_off_is_passed_over(tmp_path: Path) -> None:
    """Ranks 0 and 1 are in the view, and their records in the store."""
    with far_ranks(tmp_path, SLOTS) as group:
        group.start(0, 1, 2, 3)
        group.enter(0, 1, 2, 3)
        for rank in (0, 1):
            os.kill(group.ranks[rank].pid, signal.SIGSTOP)
            wait_until_all_threads_stand_still(group.ranks[rank].pid)
        group.kill(2)
        group.start(2, empty=True, disk=True)
        group.ranks[2].tell("repair", epoch=2, active=[0, 1, 2, 3], incarnations=group.lives)
        said = group.ranks[2].hear()
        assert (said["wrong"], said["moved"]) == ([], {"disk": EACH})
        for rank in (0, 1):
            os.kill(group.ranks[rank].pid, signal.SIGCONT)

        group.network.cut(0, 1)
        group.kill(2)
        group.start(2, empty=True, disk=True)
        group.ranks[2].tell("repair", epoch=3, active=[0, 1, 2, 3], incarnations=group.lives)
        said = group.ranks[2].hear()
        assert (said["wrong"], said["moved"]) == ([], {"disk": EACH})
        group.network.heal()
        group.kill(2)
        group.start(2, empty=True, disk=True)
        group.ranks[2].tell("repair", epoch=4, active=[0, 1, 2, 3], incarnations=group.lives)
        said = group.ranks[2].hear()
        assert (said["wrong"], said["moved"]) == ([], {"far peer": EACH}), "when it is back, it is a source again"
