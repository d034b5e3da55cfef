"""A spare that is a whole rank: the next life of a rank, held just before its first step.

It starts as any life does, while another process still is the rank: it builds the model over the weights of that one,
captures its graphs and warms up. What it must not share yet, it has placeholders for. Then it says that it is ready and
waits. When the rank is lost it is told which life it is, and *begins*: every part of it that waited for this is called
(:func:`when_begun`), and it joins as any life does.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from eep import faults
from eep.control.launch import spare_order
from eep.control.launch.processes import INCARNATION, RANK
from eep.control.launch.spare_order import SPARE_FOR
from eep.control.member import obey_fault_orders
from eep.observe import metrics
from sglang_patches import garbage_collector

ENTRY = "sglang_patches.rank.next_life:prepare"
Beginning = Callable[[int], None]
_beginnings: list[Beginning] = []


def prepare() -> None:
    """Run as the rank for which this spare is, up to its first step. Returns when that life is over."""
    from sglang_patches.rank import rank_process

    os.environ[RANK] = os.environ[SPARE_FOR]
    _hide_metrics(int(os.environ[RANK]))
    rank_process.main()


def is_awaited() -> bool:
    """Whether this process is a rank that does not know yet which life it is."""
    return RANK in os.environ and INCARNATION not in os.environ


def when_begun(begin: Beginning) -> None:
    """Call this with the number of the life as soon as it is known; in any rank but a spare that is now."""
    if is_awaited():
        _beginnings.append(begin)
    else:
        begin(int(os.environ[INCARNATION]))


def await_beginning() -> None:
    """In a spare: wait to be told which life this is. In any other rank this does nothing."""
    if not is_awaited():
        return
    garbage_collector.freeze_this_process(collect=True)
    rank = os.environ[RANK]
    spare_order.await_order()
    began = time.monotonic()
    if os.environ[RANK] != rank:
        raise RuntimeError(f"a spare of rank {rank} was told to become rank {os.environ[RANK]}")
    obey_fault_orders()
    faults.at("spare.told")
    waiting, _beginnings[:] = list(_beginnings), []
    for begin in waiting:
        begin(int(os.environ[INCARNATION]))
    faults.at("spare.begun")
    took = (time.monotonic() - began) * 1e3
    print(
        f"eep: a spare begins as incarnation {os.environ[INCARNATION]} of rank {rank}, after {took:.0f} ms", flush=True
    )


def _hide_metrics(rank: int) -> None:
    """What a spare counts while it warms up is nobody's business: it goes to a folder of its own, which is removed."""
    shown = os.environ.get(metrics.DIRECTORY)
    if not shown:
        return
    hidden = Path(shown) / f"spare-{rank}"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    os.environ[metrics.DIRECTORY] = str(hidden)

    def show(_: int) -> None:
        os.environ[metrics.DIRECTORY] = shown
        metrics.name_metric_files(f"rank-{rank}")
        shutil.rmtree(hidden, ignore_errors=True)

    _beginnings.append(show)
