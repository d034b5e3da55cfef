"""What there is to say about each change of who is in: which ranks, how long it took to agree and to repair, what was brought
in from where, and how many requests moved. Pure.

The time of a change begins with the first sign of it. A loss in the middle of a change is part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eep.membership.effects import Effect, LossCause, Notify, PhaseChanged, RankGone
from eep.view import View

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RepairTold:
    """A rank has settled in an epoch, and has brought in so many experts. ``sources``: bytes, by the tier they came from."""

    rank: int
    epoch: int
    experts: int
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MovedTold:
    """The front end has moved so many requests of a life of a rank."""

    rank: int
    incarnation: int
    requests: int


ChangeReport = RepairTold | MovedTold


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
    repairs: tuple[RepairTold, ...] = ()
    moved: int = 0


@dataclass(frozen=True, slots=True)
class EndedChange:
    """A change after which the ranks run. Times are those of the clock that the effects were timed with."""

    epoch: int
    active: int
    lost: tuple[tuple[int, int], ...]
    """(rank, incarnation)"""
    causes: tuple[str, ...]
    """Of what was lost, each once."""
    joined: tuple[int, ...]
    began_at: float
    agreed_at: float
    ended_at: float
    experts: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0

    def fields(self) -> dict[str, Any]:
        """For programs."""
        return {
            "epoch": self.epoch,
            "active_ranks": self.active,
            "lost": [rank for rank, _ in self.lost],
            "causes": list(self.causes),
            "joined": list(self.joined),
            "agree_ms": _rounded(self.agreed_at - self.began_at),
            "repair_ms": _rounded(self.ended_at - self.agreed_at),
            "total_ms": _rounded(self.ended_at - self.began_at),
            "experts": self.experts,
            "bytes": dict(self.sources),
            "requests_moved": self.moved,
        }

    def __str__(self) -> str:
        lost = [rank for rank, _ in self.lost]
        how = "left" if self.causes == (LossCause.LEFT.value,) else f"lost ({', '.join(self.causes)})"
        said = [f"{_ranks(lost)} {how}"] if lost else []
        said += [f"{_ranks(list(self.joined))} joined"] if self.joined else []
        moved = f"{_counted(self.moved, 'request')} moved, " if self.moved else ""
        return (
            f"{', '.join(said) or 'the epoch ended'}: {_ms(self.agreed_at - self.began_at)} to agree, "
            f"{_ms(self.ended_at - self.agreed_at)} repair{_brought_in(self.experts, self.sources)}, "
            f"{moved}{_ms(self.ended_at - self.began_at)} in all; epoch {self.epoch}, {self.active} ranks in"
        )


@dataclass(frozen=True, slots=True)
class SettledRank:
    """A rank has done its part of the change under way, so many seconds after its first sign."""

    told: RepairTold
    seconds: float

    def fields(self) -> dict[str, Any]:
        """For programs."""
        return {
            "epoch": self.told.epoch,
            "rank": self.told.rank,
            "settled_ms": _rounded(self.seconds),
            "experts": self.told.experts,
            "bytes": self._sources(),
        }

    def __str__(self) -> str:
        return (
            f"rank {self.told.rank} settled in epoch {self.told.epoch} after {_ms(self.seconds)}"
            f"{_brought_in(self.told.experts, self._sources())}"
        )

    def _sources(self) -> dict[str, int]:
        return {tier: count for tier, count in self.told.sources.items() if count}


def rank_settled(change: OpenChange, told: RepairTold, now: float) -> SettledRank | None:
    """What there is to say of a rank that has settled. None if no change is under way, or it is about another epoch."""
    if change.began_at is None or change.view is None or told.epoch != change.view.epoch:
        return None
    return SettledRank(told, now - change.began_at)


def add_to_change(change: OpenChange, effect: Effect, now: float) -> tuple[OpenChange, EndedChange | None]:
    """The change after one more effect at ``now``; and what there is to say of it, if that has ended it."""
    match effect:
        case RankGone(rank=rank, kind=kind):
            is_in = (rank, effect.incarnation) in change.ran
            return replace(change, causes=(*change.causes, (rank, kind.value)) if is_in else change.causes), None
        case Notify(view=view):
            return replace(change, view=view), None
        case PhaseChanged(phase="REVOKED" | "AGREED" | "FORMING" as phase):
            began = now if change.began_at is None else change.began_at
            agreed = change.agreed_at if phase == "REVOKED" else now
            return replace(change, began_at=began, agreed_at=agreed), None
        case PhaseChanged(phase="RUN") if change.began_at is not None and change.view is not None:
            runs = frozenset((rank, change.view.incarnations[rank]) for rank in change.view.active)
            return OpenChange(runs, change.view), _end(change, change.view, change.began_at, runs, now)
    return change, None


def add_report(change: OpenChange, report: ChangeReport) -> OpenChange:
    """The change after one more report of those who take part in it."""
    match report:
        case RepairTold():
            return replace(change, repairs=(*change.repairs, report))
        case MovedTold(requests=requests):
            return replace(change, moved=change.moved + requests)


def _end(change: OpenChange, view: View, began: float, runs: frozenset[tuple[int, int]], now: float) -> EndedChange:
    causes, lost = dict(change.causes), tuple(sorted(change.ran - runs))
    return EndedChange(
        view.epoch,
        len(runs),
        lost,
        tuple(sorted({causes.get(rank, LossCause.EXIT.value) for rank, _ in lost})),
        tuple(sorted(rank for rank, _ in runs - change.ran)),
        began,
        began if change.agreed_at is None else change.agreed_at,
        now,
        sum(repair.experts for repair in change.repairs),
        _sources_of(change),
        change.moved,
    )


def describe_open(change: OpenChange, now: float) -> dict[str, Any] | None:
    """The change under way, for operators: who has settled, and what was brought in so far. None if there is none."""
    if change.began_at is None:
        return None
    epoch = change.view.epoch if change.view is not None else -1
    return {
        "seconds": round(now - change.began_at, 3),
        "settled": sorted({repair.rank for repair in change.repairs if repair.epoch == epoch}),
        "experts": sum(repair.experts for repair in change.repairs),
        "bytes": _sources_of(change),
        "requests_moved": change.moved,
    }


def _sources_of(change: OpenChange) -> dict[str, int]:
    found: Counter[str] = Counter()
    for repair in change.repairs:
        found.update({tier: count for tier, count in repair.sources.items() if count})
    return dict(found)


def _brought_in(experts: int, sources: Mapping[str, int]) -> str:
    if not experts:
        return ""
    parts = [f"{count / _MIB:.1f} MiB from {tier}" for tier, count in sources.items()]
    return f" ({', '.join([_counted(experts, 'expert'), *parts])})"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _rounded(seconds: float) -> float:
    return round(seconds * 1000, 3)
