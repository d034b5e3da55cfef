"""What a server that may move experts does more in each step, timed where it does it. For the bench of the balance alone.

This file is an SGLang plugin of its own, which :class:`~bench.common.server_switch.ServerSwitch` puts beside one server. Each
rank adds up the processor time of what it does for the balance, and writes it down now and then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.server_switch import find_switch

MODULE = "bench.balance.added_work"
_WRITES_EVERY = 50


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is None:
        return
    _, folder = found
    from eep.experts.balancing.balance_turns import BalanceTurns
    from eep.experts.balancing.balancer import Balancer
    from sglang_patches.rank.rank_data_plane import RankDataPlane

    spent = {"counting": 0.0, "asking": 0.0, "thread": 0.0}

    def timed(kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            watch = _ThreadWatch()
            try:
                return work(*arguments, **named)
            finally:
                spent[kind] += watch.read()

        return run

    def asking(turns: BalanceTurns, gather: Callable[[], Any], timeout: float) -> Callable[[], Any]:
        """What surrounds the gathering that there is anyway."""
        watch = _ThreadWatch()

        def inside() -> Any:
            nonlocal watch
            spent["asking"] += watch.read()
            result = gather()
            watch = _ThreadWatch()
            return result

        work = wrapped(turns, inside, timeout)

        def run() -> Any:
            nonlocal watch
            watch = _ThreadWatch()
            result = work()
            spent["asking"] += watch.read()
            return result

        return run

    def stepped(balancer: Balancer) -> None:
        count(balancer)
        if balancer._steps % _WRITES_EVERY == 0:
            write_work(
                folder, {"steps": balancer._steps, "at": time.perf_counter(), "all": time.process_time(), **spent}
            )

    wrapped, count = BalanceTurns.asking, Balancer.stepped
    patched: dict[type, dict[str, Callable[..., Any]]] = {
        RankDataPlane: {"count": timed("counting", RankDataPlane.count)},
        BalanceTurns: {
            "asking": asking,
            "switch_if_agreed": timed("asking", BalanceTurns.switch_if_agreed),
        },
        Balancer: {"stepped": stepped, "look": timed("thread", Balancer.look)},
    }
    for owner, methods in patched.items():
        for name, method in methods.items():
            setattr(owner, name, method)


class _ThreadWatch:
    """Processor time of this thread since it was made, without what reading the clock takes. On a virtual machine, in the
    midst of a step, that is some microseconds, as much as what is timed here. So nothing is timed first. A reading before
    that brings the clock into the caches: without it, nothing would take longer than something. What is told still is too
    much rather than too little: a stretch with nothing in it takes some four microseconds."""

    __slots__ = ("_began", "_nothing")

    def __init__(self) -> None:
        time.thread_time()
        first = time.thread_time()
        self._began = time.thread_time()
        self._nothing = self._began - first

    def read(self) -> float:
        return time.thread_time() - self._began - self._nothing


def write_work(folder: Path, figures: dict[str, float]) -> None:
    """In a rank, now and then."""
    path = folder / f"work-{os.environ['EEP_RANK']}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(figures))
    fresh.rename(path)


def read_work(folder: Path, ranks: int) -> list[dict[str, float]] | None:
    """What each rank has written; None while one has written nothing."""
    paths = [folder / f"work-{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return None
    return [json.loads(path.read_text()) for path in paths]
