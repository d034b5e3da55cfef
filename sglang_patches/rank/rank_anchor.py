"""The anchors of this rank's weights: through them, memory outlives the process, or the server (``--eep-anchor``).

In the directory of an anchor a rank takes a lock that it has until it ends. So a server never takes over what another one
still uses.
"""

from __future__ import annotations

import fcntl
import os
import time
from functools import cache
from pathlib import Path
from typing import IO

from eep.anchor.anchor import Anchor
from eep.control.launch.processes import RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from sglang_patches import options
from sglang_patches.rank import next_life

OF_ALL_RANKS = -1
"""In place of a rank, for memory that ranks share and that is the same in every life."""
LOCKED_WITHIN = 20.0
"""Seconds. The ranks of a server that has crashed end a moment after it."""
_LIVES = 1 << 20
"""A rank has fewer lives in a server."""
_lock: IO[str] | None = None


def is_rank() -> bool:
    """Whether this process is a rank of a server."""
    return CONTROL_DIRECTORY in os.environ and RANK in os.environ


@cache
def own_anchor() -> Anchor:
    rank, asked = int(os.environ[RANK]), options.required().anchor
    anchor = Anchor(Path(os.environ[CONTROL_DIRECTORY] if asked is None else asked.directory), rank)

    def begin(life: int) -> None:
        if asked is not None:
            _take_lock(anchor.directory, rank)
            life += asked.server * _LIVES
        anchor.begin(life)

    next_life.when_begun(begin)
    return anchor


@cache
def common_anchor() -> Anchor:
    return Anchor(own_anchor().directory, OF_ALL_RANKS, 0)


def describe_life(number: int) -> str:
    """Whose memory it is, in words."""
    asked = options.required().anchor
    if asked is not None and number // _LIVES != asked.server:
        return "an earlier server"
    return f"life {number % _LIVES}"


def _take_lock(directory: Path, rank: int) -> None:
    """Until this process ends. SystemExit if another one does not give it up."""
    global _lock
    _lock = (directory / f"rank-{rank}.lock").open("w")
    if not lock_within(_lock, LOCKED_WITHIN):
        raise SystemExit(
            f"--eep-anchor {directory}: rank {rank} of another server uses it; stop that server, or give this one an anchor "
            "of its own"
        )


def lock_within(file: IO[str], seconds: float) -> bool:
    """Whether this process has the lock of a file by then. It has it until it closes the file, or ends."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        else:
            return True
