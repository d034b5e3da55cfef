"""What follows when a deadline has passed: a wait is over, or a rank that missed it is fenced."""

from __future__ import annotations

from eep.membership.effects import LossCause
from eep.membership.events import Deadline, Timer
from eep.membership.records import Phase
from eep.membership.state import LocalRank, RankStatus
from eep.membership.turn import Turn


def deadline_passed(turn: Turn, event: Deadline) -> None:
    """The handler of :class:`Deadline`. One that was set for an epoch or a life that is over changes nothing."""
    if event.timer is Timer.JUDGE:
        turn.update(judged=max(turn.state.judged, event.number))
    elif event.timer is Timer.REGROUP:
        turn.update(regrouped=max(turn.state.regrouped, event.number))
    elif event.timer is Timer.MAKE_DO:
        turn.update(made_do=max(turn.state.made_do, event.number))
    elif event.timer is Timer.NEWS:
        # What another host said was never decided upon. This host holds its ranks, and must say so.
        turn.update(told_revoked=max(turn.state.told_revoked, event.number))
    elif event.timer is Timer.SETTLE:
        _settle_late(turn, event.number)
    else:
        local = turn.state.ranks.get(event.rank)
        if local is not None and local.incarnation == event.number:
            _rank_late(turn, event.timer, event.rank, local)


def _settle_late(turn: Turn, epoch: int) -> None:
    instance = turn.state.instance
    if instance is None or instance.view.epoch != epoch or instance.phase is not Phase.AGREED:
        return
    for rank, local in turn.state.ranks.items():
        if turn.state.is_in(rank) and local.settled != epoch:
            turn.fence(rank, f"rank {rank} did not settle in epoch {epoch} in time", LossCause.LATE)


def _rank_late(turn: Turn, timer: Timer, rank: int, local: LocalRank) -> None:
    if timer is Timer.RELAUNCH and local.status is RankStatus.RESTING:
        turn.update_rank(rank, status=RankStatus.WANTED)
    elif timer is Timer.START and local.status is RankStatus.STARTING:
        turn.fence(rank, f"rank {rank} was not ready in time", LossCause.LATE)
    elif timer is Timer.LEAVE and local.status is RankStatus.LEAVING:
        turn.fence(rank, f"rank {rank} had left but did not end", LossCause.LATE)
    elif timer is Timer.FENCE and local.status is RankStatus.FENCING:
        turn.update_rank(rank, status=RankStatus.STUCK)
        turn.log(
            "STUCK",
            f"rank {rank} was killed but does not end; it is out, and not replaced until it ends",
            rank,
        )
    elif timer is Timer.STABLE and turn.state.is_in(rank):
        turn.update_rank(rank, failures=0)
