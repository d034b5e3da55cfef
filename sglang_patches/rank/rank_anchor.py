"""The anchor of this rank: through it, memory outlives the process."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from eep.anchor.anchor import Anchor
from eep.control.launch.processes import INCARNATION, RANK
from eep.control.private_directory import CONTROL_DIRECTORY

OF_ALL_RANKS = -1
"""In place of a rank, for memory that ranks share and that is the same in every life."""


def is_rank() -> bool:
    """Whether this process is a rank of a server."""
    return CONTROL_DIRECTORY in os.environ and RANK in os.environ


@cache
def own_anchor() -> Anchor:
    return Anchor(Path(os.environ[CONTROL_DIRECTORY]), int(os.environ[RANK]), int(os.environ[INCARNATION]))


@cache
def common_anchor() -> Anchor:
    return Anchor(Path(os.environ[CONTROL_DIRECTORY]), OF_ALL_RANKS, 0)
