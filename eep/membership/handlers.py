"""What each event means for what a host knows. Used by :func:`eep.membership.step` only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eep.membership.deadlines import deadline_passed
from eep.membership.effects import Fence, LossCause
from eep.membership.events import (
    Action,
    Deadline,
    EvidenceGiven,
    Exited,
    Failed,
    InstanceSeen,
    LeaseHeld,
    LeaseLost,
    Leave,
    LinksSeen,
    NewsHeard,
    OperatorAsked,
    Proposed,
    PulseStopped,
    Ready,
    ReportSeen,
    ReportsListed,
    RevokeSeen,
    Settled,
    Stalled,
    StallKind,
    StopAsked,
    Suspected,
    Timer,
)
from eep.membership.news import with_news
from eep.membership.records import Accusation, Report
from eep.membership.state import RankStatus, is_known
from eep.membership.turn import Turn


def _exited(turn: Turn, event: Exited) -> None:
    local = turn.process(event.rank, event.incarnation, "exit")
    if local is None:
        return
    if turn.state.is_in(event.rank):
        turn.revoke(f"rank {event.rank} exited: {event.evidence}")
    turn.say_gone(event.rank, local, f"rank {event.rank} exited")
    turn.log("EXITED", f"rank {event.rank} exited", event.rank, evidence=event.evidence)
    failures = local.failures if local.blameless else local.failures + 1
    policy = turn.state.policy
    limit = policy.relaunch_limit
    status = RankStatus.WANTED
    if turn.state.stopping or not local.keep or event.clean:
        status = RankStatus.DOWN
    elif failures > limit:
        status = RankStatus.DOWN
        turn.log(
            "GIVEN-UP",
            f"rank {event.rank} failed {failures} times in a row, the limit is {limit}",
            event.rank,
        )
    elif failures > 1:
        status = RankStatus.RESTING
        delay = min(policy.relaunch_backoff * 2 ** min(failures - 2, 32), policy.longest_backoff)
        turn.set_timer(Timer.RELAUNCH, event.incarnation, delay, event.rank)
    turn.update_rank(event.rank, status=status, failures=failures, blameless=False)


def _pulse_stopped(turn: Turn, event: PulseStopped) -> None:
    local = turn.process(event.rank, event.incarnation, "last heartbeat")
    if local is None or local.status is RankStatus.ENDING:
        return
    cause = f"rank {event.rank} is dying"
    if turn.state.is_in(event.rank):
        turn.revoke(cause)
    # One thread of the rank is gone. End the others too, rather than wait for the kernel to clear up.
    if local.runs:
        turn.do(Fence(event.rank, event.incarnation, cause))
    turn.update_rank(event.rank, status=RankStatus.ENDING)
    turn.say_gone(event.rank, local, cause)
    turn.log("DYING", cause, event.rank)


def _failed(turn: Turn, event: Failed) -> None:
    """Its process is alive until it is fenced, and may hang where it would end."""
    if turn.process(event.rank, event.incarnation, "failure") is not None:
        turn.fence(event.rank, f"rank {event.rank} failed: {event.evidence}", LossCause.EXCEPTION, failed=True)


def _stalled(turn: Turn, event: Stalled) -> None:
    if turn.process(event.rank, event.incarnation, "standstill") is not None:
        why = f"rank {event.rank} made no progress for {event.seconds:.{1 if event.seconds < 10 else 0}f} s"
        why += f": {event.kind.value}" if event.kind.value else ""
        turn.fence(event.rank, why, LossCause.STOPPED if event.kind is StallKind.STOPPED else LossCause.STALLED)


def _ready(turn: Turn, event: Ready) -> None:
    local = turn.process(event.rank, event.incarnation, "readiness")
    if local is not None and local.status is RankStatus.STARTING:
        turn.update_rank(event.rank, status=RankStatus.READY)
        turn.log("READY", f"rank {event.rank} is ready to join", event.rank)


def _settled(turn: Turn, event: Settled) -> None:
    if turn.process(event.rank, event.incarnation, "settling") is None:
        return
    if event.epoch != turn.state.epoch or not turn.state.is_in(event.rank):
        turn.reject(
            "stale-epoch", f"rank {event.rank} settled in epoch {event.epoch}, but the epoch is {turn.state.epoch} now"
        )
        return
    turn.update_rank(event.rank, settled=event.epoch)
    members = [rank for rank in turn.state.ranks if turn.state.is_in(rank)]
    if all(turn.state.ranks[rank].settled == event.epoch for rank in members):
        turn.update(settled=event.epoch)


def _suspected(turn: Turn, event: Suspected) -> None:
    if turn.process(event.rank, event.incarnation, "suspicion") is None:
        return
    instance, epoch = turn.state.instance, turn.state.epoch
    if instance is None or event.epoch != epoch or not turn.state.is_in(event.rank):
        turn.reject("stale-epoch", f"rank {event.rank} suspects in epoch {event.epoch}, but the epoch is {epoch} now")
        return
    known = {s for s in event.suspects if s in instance.view.active and s != event.rank}
    if known != set(event.suspects) or not known:
        turn.reject(
            "unknown-rank",
            f"rank {event.rank} suspects {event.suspects}; it may suspect other ranks of {instance.view.active}",
        )
        return
    told = {(a.accuser, a.suspect): a for a in turn.state.accusations if a.epoch == epoch}
    for suspect in sorted(known):
        told.setdefault((event.rank, suspect), Accusation(epoch, event.rank, suspect, event.evidence))
    if tuple(told.values()) != turn.state.accusations:
        turn.update(accusations=tuple(told.values()))
        turn.log("SUSPECTED", f"rank {event.rank} suspects {sorted(known)}", event.rank, evidence=event.evidence)
    turn.revoke(f"rank {event.rank} waited in vain for {sorted(known)}: {event.evidence}")


def _revoke_seen(turn: Turn, event: RevokeSeen) -> None:
    if turn.process(event.rank, event.incarnation, "revocation") is None:
        return
    is_news = turn.state.revoked < event.epoch
    if is_news and event.epoch == turn.state.epoch and turn.state.is_in(event.rank):
        turn.revoke(f"rank {event.rank} found epoch {event.epoch} revoked")


def _leave(turn: Turn, event: Leave) -> None:
    if turn.process(event.rank, event.incarnation, "leave") is not None:
        _take_out(turn, event.rank, f"rank {event.rank} asked to leave")


def _take_out(turn: Turn, rank: int, cause: str, operation: str = "") -> None:
    local = turn.state.ranks[rank]
    turn.update_rank(rank, keep=False)
    if local.status in (RankStatus.WANTED, RankStatus.RESTING):
        turn.update_rank(rank, status=RankStatus.DOWN)
    elif local.status in (RankStatus.STARTING, RankStatus.READY):
        turn.update_rank(rank, status=RankStatus.LEAVING)
        turn.log("LEAVING", cause, rank, operation=operation)
        if not turn.state.is_in(rank):  # no view change will come for it
            turn.set_timer(Timer.LEAVE, local.incarnation, turn.state.policy.leave_grace, rank)


def _operator_asked(turn: Turn, event: OperatorAsked) -> None:
    local = turn.state.ranks.get(event.rank)
    if local is None:
        turn.reject("unknown-rank", f"this host has no rank {event.rank}; it has {sorted(turn.state.ranks)}")
        return
    if not turn.remember(event.operation):
        return
    cause = f"an operator asked to {event.action.value} rank {event.rank}"
    turn.log("ASKED", cause, event.rank, operation=event.operation)
    if event.action is Action.REMOVE:
        _take_out(turn, event.rank, cause, event.operation)
    elif event.action is Action.KILL:
        turn.fence(event.rank, cause, LossCause.OPERATOR, blameless=True)
    else:
        turn.update_rank(event.rank, keep=True, failures=0)
        if local.status in (RankStatus.DOWN, RankStatus.RESTING):
            turn.update_rank(event.rank, status=RankStatus.WANTED)


def _evidence_given(turn: Turn, event: EvidenceGiven) -> None:
    if event.rank not in turn.state.ranks:
        turn.reject("unknown-rank", f"evidence of rank {event.rank}, but this host has {sorted(turn.state.ranks)}")
        return
    if not turn.remember(event.operation):
        return
    turn.log("EVIDENCE", event.evidence, event.rank, operation=event.operation)
    if event.fatal:
        why = f"the hardware of rank {event.rank} fails: {event.evidence}"
        turn.fence(event.rank, why, LossCause.HARDWARE)


def _stop_asked(turn: Turn, _: StopAsked) -> None:
    turn.update(stopping=True)
    for rank, local in turn.state.ranks.items():
        if local.has_process:
            turn.fence(rank, "the supervisor is stopping", LossCause.END)
        else:
            turn.update_rank(rank, status=RankStatus.DOWN)


def _instance_seen(turn: Turn, event: InstanceSeen) -> None:
    turn.adopt(event.instance, event.version)


def _proposed(turn: Turn, event: Proposed) -> None:
    if event.serial != turn.state.in_flight:
        return
    turn.update(in_flight=0)
    if event.committed is None:
        return
    # The store answered after we proposed, so it must hold at least the record that we proposed to follow.
    built_on = event.serial - 1
    if built_on > 0 and (event.instance is None or event.instance.serial < built_on):
        turn.distrust(event.instance)
    else:
        turn.adopt(event.instance, event.version)


def _report_seen(turn: Turn, event: ReportSeen) -> None:
    if event.version <= max(turn.state.listed, turn.state.seen.get(event.host, 0)):
        return
    reports = {host: report for host, report in turn.state.reports.items() if host != event.host}
    if event.report is not None and _is_sound(turn, event.host, event.report):
        reports[event.host] = event.report
    turn.update(reports=reports, seen={**turn.state.seen, event.host: event.version})


def _reports_listed(turn: Turn, event: ReportsListed) -> None:
    if event.version < turn.state.listed:
        return
    # Changes may overtake the listing that they follow; what they said stands.
    newer = {host: version for host, version in turn.state.seen.items() if version > event.version}
    reports = {host: report for host, report in event.reports.items() if _is_sound(turn, host, report)}
    reports = {host: report for host, report in reports.items() if host not in newer}
    reports.update({host: report for host, report in turn.state.reports.items() if host in newer})
    turn.update(reports=reports, scope=event.scope, listed=event.version, seen=newer, looking=False)


def _is_sound(turn: Turn, host: str, report: Report) -> bool:
    bad = [rank for rank in report.ranks if not 0 <= rank < turn.state.policy.max_ranks]
    if bad:
        turn.reject("unknown-rank", f"{host} reports ranks {bad}; there is room for {turn.state.policy.max_ranks}")
    return not bad


def _news_heard(turn: Turn, event: NewsHeard) -> None:
    """What follows from it is worked out at the end of the step, from this record and from those to come."""
    if not is_known(turn.state, event.news.ident):
        turn.reject("unknown-host", f"{event.news.ident} sent news, but no rank is its own")
        return
    turn.update(news=with_news(turn.state.news, event.news))


def _links_seen(turn: Turn, event: LinksSeen) -> None:
    turn.update(unlinked=event.down)


def _lease_held(turn: Turn, _: LeaseHeld) -> None:
    turn.update(leased=True, published=None)


def _lease_lost(turn: Turn, _: LeaseLost) -> None:
    # From now on the others may take this host's ranks out without its knowledge: hold every rank until the
    # store answers. They are not killed: if only the store was away, they go on in the next epoch.
    if any(turn.state.is_in(rank) for rank in turn.state.ranks):
        turn.revoke("this host can no longer rely on its lease")
    turn.update(leased=False, scope="", looking=False)


HANDLERS: Mapping[type, Callable[[Turn, Any], None]] = {
    Exited: _exited,
    PulseStopped: _pulse_stopped,
    Failed: _failed,
    Stalled: _stalled,
    Ready: _ready,
    Settled: _settled,
    Suspected: _suspected,
    RevokeSeen: _revoke_seen,
    Leave: _leave,
    OperatorAsked: _operator_asked,
    EvidenceGiven: _evidence_given,
    StopAsked: _stop_asked,
    InstanceSeen: _instance_seen,
    Proposed: _proposed,
    ReportSeen: _report_seen,
    ReportsListed: _reports_listed,
    NewsHeard: _news_heard,
    LinksSeen: _links_seen,
    LeaseHeld: _lease_held,
    LeaseLost: _lease_lost,
    Deadline: deadline_passed,
}
