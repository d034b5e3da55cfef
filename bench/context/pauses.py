"""What a kill cost the clients, by their answers. Nothing here reads a clock or asks a server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.context.plan import Turn
from eep.drill.query_answers import Answer
from eep.drill.story import Fault


class NothingMoved(ValueError):
    """A kill shows nothing if the rank was answering no long request."""


@dataclass(frozen=True)
class Pauses:
    """Seconds. Each is the largest gap between tokens, of any request of a kind."""

    context: int
    way: str
    rank: int
    running: float
    """From the kill until all survivors run."""
    rejoined: float
    """From the kill until the rank is back."""
    moved_requests: int
    """Long requests that the rank was answering."""
    moved: float
    """Of these."""
    moved_short: float | None
    """Of the short requests that the rank had; None if it had none."""
    others: float
    """Of requests at other ranks, from the kill until each of the long ones goes on."""
    usual: float
    """Of all requests in the time before the kill, when all long answers had begun."""
    restored_tokens: int
    recomputed_tokens: int


def measure(
    turn: Turn, fault: Fault, long: Sequence[Answer], short: Sequence[Answer], restored: int, recomputed: int
) -> Pauses:
    """``long`` and ``short``: the answers of the clients with such prompts, each with its rank. NothingMoved if the rank
    was answering no long request, ValueError if it did not come back."""
    if fault.running is None or fault.rejoined is None:
        raise ValueError(f"rank {fault.rank} was lost and did not come back")
    moved = [answer for answer in long if _is_under_way(answer, fault) and answer.times[0] < fault.at]
    if not moved:
        raise NothingMoved(f"rank {fault.rank} was answering no long request when it was killed: answers are too short")
    repaired = fault.at + fault.running
    waits = [max(_gaps(answer, fault.at, repaired)) for answer in moved]
    until = max(repaired, *(end for _, end in waits))
    moved_short = [answer for answer in short if _is_under_way(answer, fault)]
    others = [answer for answer in (*long, *short) if answer.rank != fault.rank]
    return Pauses(
        context=turn.context,
        way=turn.way,
        rank=fault.rank,
        running=fault.running,
        rejoined=fault.rejoined,
        moved_requests=len(moved),
        moved=max(gap for gap, _ in waits),
        moved_short=_largest(moved_short, fault.at, repaired) if moved_short else None,
        others=_largest(others, fault.at, until),
        usual=_usual(long, short, fault.at),
        restored_tokens=restored,
        recomputed_tokens=recomputed,
    )


def _is_under_way(answer: Answer, fault: Fault) -> bool:
    """Whether the rank has to answer it yet, or has to finish it."""
    return (
        answer.rank == fault.rank and answer.started < fault.at and bool(answer.times) and answer.times[-1] > fault.at
    )


def _gaps(answer: Answer, since: float, until: float) -> list[tuple[float, float]]:
    """The waits for a token that touch this time, and when each was over."""
    moments = pairwise([answer.started, *answer.times])
    return [(later - earlier, later) for earlier, later in moments if later >= since and earlier <= until]


def _largest(answers: Iterable[Answer], since: float, until: float) -> float:
    return max((gap for answer in answers for gap, _ in _gaps(answer, since, until)), default=0.0)


def _usual(long: Sequence[Answer], short: Sequence[Answer], until: float) -> float:
    """Of the waits that lie in the time in which all long requests have a token, and none is lost."""
    since = max(answer.times[0] for answer in long if answer.times)
    gaps = [0.0]
    for answer in (*long, *short):
        gaps += [gap for gap, end in _gaps(answer, since, until) if end - gap >= since and end <= until]
    return max(gaps)
