"""A spare that is a whole rank: the next life of a rank, held just before its first step.

It starts as any life does, while another process still is the rank: it builds the model over the weights of that one,
captures its graphs and warms up. What it must not share yet, it has placeholders for. Then it says that it is ready and
waits. When the rank is lost it is told which life it is, and *begins*: every part of it that waited for this is called
(:func:`when_begun`), and it joins as any life does.

A later life of a rank, a spare or not, is back before the requests of the last one have found their contexts in its caches.
So it serves its experts from its first step on, but takes the caches over, and requests, a little later: when all that
is in there was fetched, or after a second (:func:`when_free`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from eep import faults
from eep.control.launch import spare_order
from eep.control.launch.processes import INCARNATION, RANK
from eep.control.member import obey_fault_orders
from sglang_patches import garbage_collector

logger = logging.getLogger(__name__)
Beginning = Callable[[int], None]
HELD_FOR = 1.0
"""Seconds for which a life leaves the caches to the requests of the last one."""
_beginnings: list[Beginning] = []
_takings: list[Callable[[], None]] = []
_conditions: list[Callable[[], bool]] = []
_joined_at: float | None = None


def is_awaited() -> bool:
    """Whether this process is a rank that does not know yet which life it is."""
    return RANK in os.environ and INCARNATION not in os.environ


def when_begun(begin: Beginning) -> None:
    """Call this with the number of the life as soon as it is known; in any rank but a spare that is now."""
    if is_awaited():
        _beginnings.append(begin)
    else:
        begin(int(os.environ[INCARNATION]))


def is_later() -> bool:
    """Whether this is a life of a rank that had another before."""
    return is_awaited() or int(os.environ.get(INCARNATION, "0")) > 0


def when_free(take: Callable[[], None], condition: Callable[[], bool] | None = None) -> None:
    """Call this as soon as the last life is no longer needed; in a first life that is now. ``condition``: whether that is
    so, for all that this knows."""
    if not is_later():
        take()
        return
    _takings.append(take)
    if condition is not None:
        _conditions.append(condition)


def look_whether_free() -> None:
    """At the boundaries of steps."""
    global _joined_at
    if not _takings:
        return
    now = time.monotonic()
    if _joined_at is None:
        _joined_at = now
    if now - _joined_at < HELD_FOR and not all(condition() for condition in _conditions):
        return
    waiting, _takings[:] = list(_takings), []
    for take in waiting:
        take()
    logger.info("this life takes requests, %d ms after its first step", (now - _joined_at) * 1e3)


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
