"""How long something takes, and what many such times come to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def median_seconds(work: Callable[[], object], times: int) -> float:
    """The median of several runs, after one to warm up."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def percentile(values: Sequence[float], share: float) -> float:
    """The measured value below which ``share`` of all of them lie, from 0 to 1."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
