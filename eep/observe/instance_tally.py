"""What an effect of the supervisor means for the figures about the instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from eep.membership.effects import Effect, Launch, Notify, PhaseChanged, RankGone
from eep.membership.records import Phase


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of a supervisor's effects. Its figures have the names of :data:`METRICS`."""

    epoch: int = 0
    active: int = 0
    deaths: int = 0
    joins: int = 0
    relaunches: int = 0
    view_seconds: float = 0.0
    repair_seconds: float = 0.0
    pause_seconds: float = 0.0
    rejoin_seconds: float = 0.0
    _lives: frozenset[tuple[int, int]] = frozenset()
    """(rank, incarnation) of each member of the last view that ran."""
    _launched: frozenset[int] = frozenset()
    _stopped_at: float | None = None
    """Since when no rank can commit a step; None while ranks can."""
    _lost_at: float | None = None
    """When the loss was first seen that no view has followed yet."""
    _agreed_at: float | None = None
    _gone_at: frozenset[tuple[int, float]] = frozenset()
    """Ranks that were lost and are not back yet, and when that was first seen."""
    _observed: tuple[tuple[str, float], ...] = ()
    """What the last effect ended: the histogram of each, and how many seconds it took."""

    @property
    def observed(self) -> tuple[tuple[str, float], ...]:
        return self._observed


FIGURES = tuple(each.name for each in fields(Tally) if not each.name.startswith("_"))


def add_effect(tally: Tally, effect: Effect, now: float) -> Tally:
    """The tally after one more effect, at ``now`` seconds of any steady clock."""
    tally = replace(tally, _observed=())
    match effect:
        case Launch(rank=rank):
            again = rank in tally._launched
            return replace(tally, relaunches=tally.relaunches + again, _launched=tally._launched | {rank})
        case Notify(view=view, phase=phase):
            tally = replace(tally, epoch=view.epoch, active=len(view.active))
            if phase is not Phase.RUN:
                return tally
            lives = frozenset((rank, view.incarnations[rank]) for rank in view.active)
            back = {(rank, since) for rank, since in tally._gone_at if rank in view.active}
            return replace(
                tally,
                joins=tally.joins + len(lives - tally._lives),
                rejoin_seconds=max((now - since for _, since in back), default=tally.rejoin_seconds),
                _lives=lives,
                _gone_at=tally._gone_at - back,
                _observed=tuple(("rejoin_time", now - since) for _, since in sorted(back)),
            )
        case RankGone(rank=rank, asked_to_leave=asked_to_leave):
            is_first = not asked_to_leave and rank not in {each for each, _ in tally._gone_at}
            gone = {(rank, now)} if is_first else set()
            return replace(tally, deaths=tally.deaths + (not asked_to_leave), _gone_at=tally._gone_at | gone)
        case PhaseChanged(phase=entered):
            return _after_phase(tally, entered, now)
    return tally


def _after_phase(tally: Tally, phase: str, now: float) -> Tally:
    """A change begins with the first sign of a loss or with the view that admits a joiner, and ends when all ranks run.
    A rank that is lost meanwhile is part of it."""
    stopped, lost, agreed = tally._stopped_at, tally._lost_at, tally._agreed_at
    match phase:
        case "REVOKED":
            return replace(
                tally, _stopped_at=now if stopped is None else stopped, _lost_at=now if lost is None else lost
            )
        case "AGREED" | "FORMING":  # forming: no rank is left
            return replace(
                tally,
                view_seconds=tally.view_seconds if lost is None else now - lost,
                _stopped_at=now if stopped is None else stopped,
                _lost_at=None,
                _agreed_at=now,
                _observed=() if lost is None else (("view_time", now - lost),),
            )
        case "RUN" if stopped is not None:
            return replace(
                tally,
                repair_seconds=tally.repair_seconds if agreed is None else now - agreed,
                pause_seconds=now - stopped,
                _stopped_at=None,
                _lost_at=None,
                _agreed_at=None,
                _observed=(
                    ("pause_time", now - stopped),
                    *([] if agreed is None else [("repair_time", now - agreed)]),
                ),
            )
    return tally
