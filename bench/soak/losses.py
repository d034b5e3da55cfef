"""What the event log of a server says of ranks that were lost, or were thought to be. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eep.observe.event_log import EventLine

_STALLS = "made no progress"
_ENDS = ("FENCING", "DYING", "EXITED", "STUCK")
_DOUBTS = ("SUSPECTED",)


@dataclass(frozen=True, slots=True)
class Losses:
    """``lives``: those that ended, by rank and incarnation. ``stalls``: lines that say that a rank stood still, was stopped
    or hung. ``suspicions``: lines in which a rank suspects another. ``lines``: all of these, as people read them."""

    lives: tuple[tuple[int, int], ...]
    stalls: int
    suspicions: int
    lines: tuple[str, ...]


def losses_after(
    lines: Iterable[EventLine], began: float, before: Mapping[int, int], after: Mapping[int, int]
) -> Losses:
    """``began`` in seconds since 1970. ``before`` and ``after``: the incarnation of each rank then and now."""
    told = [line for line in lines if line.time >= began and line.phase in _ENDS + _DOUBTS]
    ended = {
        (line.rank, line.incarnation)
        for line in told
        if line.phase in _ENDS and line.rank is not None and line.incarnation is not None
    }
    replaced = {(rank, life) for rank, life in before.items() if after.get(rank) != life}
    return Losses(
        lives=tuple(sorted(ended | replaced)),
        stalls=sum(_STALLS in line.cause for line in told),
        suspicions=sum(line.phase in _DOUBTS for line in told),
        lines=tuple(map(str, told)),
    )
