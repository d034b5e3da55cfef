"""One line about each change of who is in: which ranks, how long it took to agree and to settle, and in all. Pure.

The time of a change begins with the first sign of it. A loss in the middle of a change is part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eep.membership.effects import Effect, Notify, PhaseChanged, RankGone
from eep.view import View


@dataclass(frozen=True, slots=True)
class OpenChange:
    """The change that is under way, and the view that ran before it."""

    ran: frozenset[tuple[int, int]] = frozenset()
    """(rank, incarnation) of each member of the last view that ran."""
    view: View | None = None
    causes: tuple[tuple[int, str], ...] = ()
    """Each rank that was lost, and why."""
    began_at: float | None = None
    agreed_at: float | None = None


def add_to_change(change: OpenChange, effect: Effect, now: float) -> tuple[OpenChange, str | None]:
    """The change after one more effect at ``now``, and the line about it if that has ended it."""
    match effect:
        case RankGone(rank=rank, kind=kind, asked_to_leave=asked):
            is_in = (rank, effect.incarnation) in change.ran
            cause = "left" if asked else kind.value
            return replace(change, causes=(*change.causes, (rank, cause)) if is_in else change.causes), None
        case Notify(view=view):
            return replace(change, view=view), None
        case PhaseChanged(phase="REVOKED" | "AGREED" | "FORMING" as phase):
            began = now if change.began_at is None else change.began_at
            agreed = change.agreed_at if phase == "REVOKED" else now
            return replace(change, began_at=began, agreed_at=agreed), None
        case PhaseChanged(phase="RUN") if change.began_at is not None and change.view is not None:
            runs = frozenset((rank, change.view.incarnations[rank]) for rank in change.view.active)
            return OpenChange(runs, change.view), _line(change, runs, now)
    return change, None


def _line(change: OpenChange, runs: frozenset[tuple[int, int]], now: float) -> str:
    assert change.began_at is not None
    assert change.view is not None
    agreed = change.began_at if change.agreed_at is None else change.agreed_at
    causes = dict(change.causes)
    lost = sorted(rank for rank, _ in change.ran - runs)
    said = [f"{_ranks(lost)} lost ({', '.join(sorted({causes.get(rank, 'exit') for rank in lost}))})"] if lost else []
    joined = sorted(rank for rank, _ in runs - change.ran)
    said += [f"{_ranks(joined)} joined"] if joined else []
    return (
        f"{', '.join(said) or 'the epoch ended'}: {_ms(agreed - change.began_at)} to agree, {_ms(now - agreed)} to settle, "
        f"{_ms(now - change.began_at)} in all; epoch {change.view.epoch}, {len(runs)} ranks in"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
