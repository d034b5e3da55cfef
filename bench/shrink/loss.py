"""The loss of several ranks at once, read off the views that a server went through and the tokens that its clients got."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eep.view import View

WINDOW = 5.0
"""Seconds over which tokens per second are taken."""
ENOUGH = 0.95
"""Of the tokens per second before a loss."""
_STEP = 0.1
_EPOCH = re.compile(r"epoch (\d+): ")

Seen = tuple[float, View, bool]
"""When a view was seen, and whether its ranks run."""


@dataclass(frozen=True)
class Loss:
    """Times are those of one clock."""

    ranks: list[int]
    at: float
    running: float
    """Ranks run without those lives."""
    epoch: int
    """Of the view in which they do."""
    back: float
    """All ranks run, the lost ones in later lives."""

    def told(self, tokens: Sequence[float]) -> dict[str, float | None]:
        """Seconds from the kill, and tokens per second; ``tokens``: when clients got them, in order."""
        before = _rate(tokens, self.at - WINDOW, self.at)
        degraded = _rate(tokens, self.running, self.back)
        return {
            "lost": len(self.ranks),
            "running_s": round(self.running - self.at, 4),
            "back_s": round(self.back - self.at, 4),
            "before_per_s": round(before, 1),
            "without_them_per_s": round(degraded, 1),
            "enough_s": _rounded(self._enough_after(tokens, before)),
        }

    def _enough_after(self, tokens: Sequence[float], before: float) -> float | None:
        """When a window begins with enough tokens per second; None if that does not come while there are tokens."""
        moment = self.at
        while tokens and moment + WINDOW <= tokens[-1]:
            if _rate(tokens, moment, moment + WINDOW) >= ENOUGH * before:
                return moment - self.at
            moment += _STEP
        return None


def loss_of(views: Sequence[Seen], lives: Mapping[int, int], at: float) -> Loss | None:
    """Of the ranks with these lives, at that time; None while it is not over."""
    running, epoch = 0.0, -1
    for when, view, runs in views:
        if when < at or not runs or any(_lives_in(view, rank, life) for rank, life in lives.items()):
            continue
        if epoch < 0:
            running, epoch = when, view.epoch
        if all(rank in view.active for rank in range(len(view.incarnations))):
            return Loss(sorted(lives), at, running, epoch, when)
    return None


def lines_until(log: str, epoch: int) -> str:
    """Those that tell of views up to that one."""
    return "\n".join(line for line in log.splitlines() if (found := _EPOCH.search(line)) and int(found[1]) <= epoch)


def _lives_in(view: View, rank: int, life: int) -> bool:
    return rank in view.active and view.incarnations[rank] <= life


def _rate(tokens: Sequence[float], since: float, until: float) -> float:
    return (bisect_left(tokens, until) - bisect_left(tokens, since)) / max(until - since, 1e-9)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
