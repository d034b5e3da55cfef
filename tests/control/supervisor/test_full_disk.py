"""A directory that is full or read-only costs no rank that runs, and a lost rank comes back when there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.harness import PATIENCE, ROOT
from tests.control.supervisor.full_disk import KINDS

MOUNT = 'mount -t tmpfs -o size=1m,nr_inodes=200,mode=700 none "$1" && shift'


def in_own_mount(place: Path, *command: str) -> list[str]:
    """``command`` in a namespace in which a small file system is mounted on ``place``. It goes with the last process."""
    return ["unshare", "-m", "sh", "-c", f'{MOUNT} && exec "$@"', "sh", str(place), *command]


@pytest.mark.parametrize("kind", KINDS)
def test_survivors_run_without_room_and_a_lost_rank_comes_back(kind: str, tmp_path: Path) -> None:
    if subprocess.run(in_own_mount(tmp_path, "true"), capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    done = subprocess.run(
        in_own_mount(tmp_path, sys.executable, "-m", "tests.control.supervisor.full_disk", kind, str(tmp_path)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    warnings = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert any("df " in line for line in warnings), done.stderr[-4000:]
    assert len(warnings) == len(set(warnings)), "the same was said twice"
