"""When no client heard anything although ranks ran: a standstill that no fault explains. Decisions only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from eep.view import View

LONGEST = {"cuda": 4.0, "cpu": 15.0}
"""Seconds that a server with many clients may be silent in one view, by device. Two busy cores take long for a prompt."""


@dataclass(frozen=True, slots=True)
class Silence:
    """No token came for that long, in one view that ran."""

    at: float
    seconds: float
    epoch: int


def find_silences(
    tokens: Sequence[float],
    views: Sequence[tuple[float, View, bool]],
    stops: Iterable[tuple[float, float]],
    began: float,
    ended: float,
    longest: float,
) -> list[Silence]:
    """Silences of more than ``longest`` seconds between ``began`` and ``ended``.

    ``tokens``: when each token of any client came. ``views``: when the instance entered each view, and whether it ran from
    then on. ``stops``: from when to when a rank was kept from running; its peers wait for it, so silence is no wonder.
    """
    heard = [began, *sorted(at for at in tokens if began < at < ended), ended]
    quiet = [(first, last) for first, last in pairwise(heard) if last - first > longest]
    excused = list(stops)
    found = []
    for (since, view, runs), until in zip(views, [*(at for at, _, _ in views[1:]), ended], strict=True):
        if not runs or not view.active:
            continue
        for first, last in quiet:
            for start, end in _without(max(first, since), min(last, until), excused):
                if end - start > longest:
                    found.append(Silence(start, end - start, view.epoch))
    return found


def _without(start: float, end: float, excused: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of a stretch of time that no excuse covers."""
    parts = [(start, end)]
    for first, last in excused:
        parts = [part for s, e in parts for part in ((s, min(e, first)), (max(s, last), e)) if part[0] < part[1]]
    return parts
