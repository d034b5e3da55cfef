"""The lives of a rank leave no files behind: a server that has lost ranks a thousand times is as small as a new one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.drills import wait_for


def files_of_ranks(directory: Path) -> list[str]:
    """What lies where ranks meet, without the numbers of incarnations."""
    names = [str(path.relative_to(directory)) for path in (directory / "r").rglob("*") if not path.is_dir()]
    return sorted(re.sub(r"\.i\d+", "", name) for name in names)


def metric_files_of_lives(server: Server, metrics: Path) -> list[str]:
    """The files of metrics that bear the number of a rank's process, of which the log has all."""
    lives = re.findall(r"starts as incarnation \d+, process (\d+)", server.log)
    assert lives
    return [name for name in os.listdir(metrics) if name.removesuffix(".db").rpartition("_")[2] in lives]


def test_lives_that_were_killed_leave_no_files(roomy: Server) -> None:
    assert roomy.directory is not None
    target = Target(roomy.directory)
    wait_for(lambda: all(rank.is_in for rank in target.ranks().values()), "all ranks are in")
    before = files_of_ranks(roomy.directory)
    assert before
    for _ in range(2):
        victim = target.ranks()[1]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(
            lambda life=victim.incarnation: (now := target.ranks()[1]).incarnation > life and now.is_in,
            "rank 1 is in again",
        )
    assert files_of_ranks(roomy.directory) == before
    assert metric_files_of_lives(roomy, roomy.directory.parent / "metrics") == []
