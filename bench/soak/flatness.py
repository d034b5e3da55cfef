"""Whether a figure grew from the first quarter of a soak to its last, beyond what it may. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WARM_UP = 0.1
"""The share of the samples that comes first and does not count: caches fill, and every rank has its second life."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much more the last quarter may have than the first: ``share`` of it, or ``plus`` if that is more."""

    share: float = 0.0
    plus: float = 0.0
    limit: float | None = None
    """A figure that is bounded rather than flat may have up to this, however it grew."""

    def admits(self, first: float, last: float) -> bool:
        if self.limit is not None:
            return last <= self.limit
        return last - first <= max(self.share * abs(first), self.plus)


ALLOWANCES: Mapping[str, Allowance] = {
    "processes": Allowance(),
    "files": Allowance(),
    "bytes": Allowance(share=0.02, plus=16 << 10),
    "bytes: event log": Allowance(limit=2 * (8 << 20)),
    "descriptors": Allowance(plus=2),
    "threads": Allowance(plus=2),
    "pss MiB": Allowance(share=0.03, plus=8),
    "uss MiB": Allowance(share=0.03, plus=8),
    "scrape": Allowance(share=0.25, plus=20),
    "scrape: bytes": Allowance(share=0.02),
    "shared memory": Allowance(),
}
"""By the whole name of a figure, or by what stands before its colon."""


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    first: float
    """The median of the first quarter after the warm-up."""
    last: float
    most: float
    is_flat: bool


def judge_growth(samples: Sequence[Mapping[str, float]]) -> list[Verdict]:
    """A verdict on every figure. A sample that lacks a figure counts as 0. ValueError if there are too few samples."""
    kept = samples[int(len(samples) * WARM_UP) :]
    quarter = len(kept) // 4
    if quarter < 2:
        raise ValueError(f"{len(samples)} samples are too few to compare quarters: 8 are the fewest")
    verdicts = []
    for name in sorted({name for sample in samples for name in sample}):
        values = [sample.get(name, 0.0) for sample in kept]
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        is_flat = allowance_of(name).admits(first, last)
        verdicts.append(Verdict(name, first, last, max(values), is_flat))
    return verdicts


def allowance_of(name: str) -> Allowance:
    return ALLOWANCES.get(name) or ALLOWANCES[name.partition(":")[0]]
