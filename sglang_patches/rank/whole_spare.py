"""What a spare runs that is a whole rank: the rank itself, up to its first step (:mod:`.next_life`)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from eep.control.launch.processes import RANK
from eep.control.launch.spare_order import SPARE_FOR
from eep.observe import metrics
from sglang_patches.rank import next_life, rank_process

ENTRY = "sglang_patches.rank.whole_spare:prepare"


def prepare() -> None:
    """Run as the rank for which this spare is, up to its first step. Returns when that life is over."""
    os.environ[RANK] = os.environ[SPARE_FOR]
    hide_metrics(int(os.environ[RANK]))
    rank_process.main()


def hide_metrics(rank: int) -> None:
    """What a spare counts while it warms up is nobody's business: it goes to a folder of its own, which is removed."""
    shown = os.environ.get(metrics.DIRECTORY)
    if not shown:
        return
    hidden = Path(shown) / f"spare-{rank}-{os.getpid()}"
    hidden.mkdir()
    os.environ[metrics.DIRECTORY] = str(hidden)

    def show(_: int) -> None:
        os.environ[metrics.DIRECTORY] = shown
        metrics.name_metric_files(f"rank-{rank}")
        shutil.rmtree(hidden, ignore_errors=True)

    next_life.when_begun(show)
