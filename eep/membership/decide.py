"""What the coordinator decides: the next record, from the record and the reports. Pure, and says why.

A record that changes carries its reason. When nothing changes, :class:`Unchanged` says what is awaited.

A view that follows a fault only shrinks. Dead ranks go out at once, in any phase; joins and leaves wait for
RUN, so that only a fault restarts a repair. Suspicion never removes a rank: an accused rank is
*condemned*, its owner fences it, and the exit that follows (or the end of its host's lease) takes it out of
the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eep.membership.events import Timer
from eep.membership.records import Accusation, InstanceRecord, Life, Phase, Report, host_of
from eep.membership.regrouping import Regrouping, joining
from eep.view import NEVER, View

Reports = Mapping[str, Report]


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The record stands as it is."""

    waiting_for: str
    """What would change it, in plain words for an operator."""


def decide(
    instance: InstanceRecord,
    reports: Reports,
    *,
    judge_epoch: int = -1,
    first_view: int = 1,
    regrouping: Regrouping | None = None,
) -> InstanceRecord | Unchanged:
    """The record that should follow ``instance``, or why it may stand as it is.

    ``reports`` maps each live host to its report. ``judge_epoch`` is the epoch whose accusations have had
    their time to come in. ``first_view`` is how many ranks a new instance waits for, and ``regrouping`` says when
    one that was lost begins again.
    """
    regrouping = regrouping or Regrouping()
    nxt = (
        _after_faults(instance, reports)
        or _after_repair(instance, reports)
        or _after_requests(instance, reports, first_view, regrouping)
        or _after_accusations(instance, reports, judge_epoch)
        or instance
    )
    # Launching takes time that a recovery does not have: it waits until the survivors run.
    if nxt.phase is Phase.RUN:
        nxt = _with_grants(nxt, reports, also="" if nxt is instance else nxt.reason)
    if nxt is not instance:
        return replace(nxt, serial=instance.serial + 1)
    return Unchanged(_waiting_for(instance, reports, first_view, regrouping))


def judge(active: Iterable[int], accusations: Iterable[Accusation]) -> tuple[int, ...]:
    """The ranks to fence, given which ranks waited in vain for which.

    The ranks with the most accusers are condemned, and a condemned rank's own word no longer counts. So:

    * a hung rank, which accuses no rank, goes alone;
    * of two ranks that accuse each other, one stays;
    * of two halves that cannot reach each other, one half stays whole.

    A rank with fewer accusers may only have waited for a condemned one. It is spared; if it is at fault, the
    next epoch accuses it again. Among equals the highest rank is condemned first.
    """
    members = set(active)
    accusers: dict[int, set[int]] = {}
    for a in accusations:
        if a.accuser in members and a.suspect in members and a.accuser != a.suspect:
            accusers.setdefault(a.suspect, set()).add(a.accuser)
    most = max((len(who) for who in accusers.values()), default=0)
    condemned: set[int] = set()
    for suspect in sorted(accusers, reverse=True):
        if len(accusers[suspect] - condemned) == most:
            condemned.add(suspect)
    return tuple(sorted(condemned))


def next_incarnation(granted: int, admitted: int) -> int:
    """The next number for a rank: above all that were granted, and of other parity than the last one that
    was in.

    The data plane keeps two inboxes per source and picks one by the parity of the incarnation, so
    neighbours in the view's history must differ in it, even when launches in between never made it in.
    """
    number = granted + 1
    return number + 1 if admitted != NEVER and (number - admitted) % 2 == 0 else number


def lives(ident: str, reports: Reports) -> bool:
    """Whether this supervisor, and not one before or after it, has a report."""
    report = reports.get(host_of(ident))
    return report is not None and report.ident == ident


def _after_faults(instance: InstanceRecord, reports: Reports) -> InstanceRecord | None:
    view = instance.view
    if not view.active:
        return None
    seen: set[tuple[int, int]] = set()
    broken: list[str] = []
    for host, report in reports.items():
        here = False
        for rank, told in report.ranks.items():
            if told.life.alive:
                seen.add((rank, told.incarnation))
                here = here or instance.has(rank, told.incarnation)
        if here and report.revoked >= view.epoch:
            broken.append(host)
    lost = [rank for rank in view.active if (rank, view.incarnations[rank]) not in seen]
    # A verdict comes before a new epoch: with the same ranks in it, the new epoch would only hang again.
    if not lost and (not broken or judge(view.active, _accusations(instance, reports))):
        return None
    reason = " and ".join(
        [_why_lost(instance, reports, rank) for rank in lost]
        + ([f"epoch {view.epoch} was revoked on {_names(broken)}"] if broken and not lost else [])
    )
    return _with_view(instance, view.without(lost), reason)


def _why_lost(instance: InstanceRecord, reports: Reports, rank: int) -> str:
    owner = instance.owners[rank]
    who = f"rank {rank} (incarnation {instance.view.incarnations[rank]})"
    return f"{who} is dead" if lives(owner, reports) else f"the lease of {owner or 'its host'} ended, taking {who}"


def _after_repair(instance: InstanceRecord, reports: Reports) -> InstanceRecord | None:
    if instance.phase is not Phase.AGREED:
        return None
    if _unsettled(instance, reports):
        return None
    return replace(instance, phase=Phase.RUN, reason=f"every rank settled in epoch {instance.view.epoch}")


def _unsettled(instance: InstanceRecord, reports: Reports) -> list[int]:
    view = instance.view
    settled = {
        (rank, told.incarnation)
        for report in reports.values()
        if report.settled == view.epoch
        for rank, told in report.ranks.items()
    }
    return [rank for rank in view.active if (rank, view.incarnations[rank]) not in settled]


def _after_requests(
    instance: InstanceRecord, reports: Reports, first_view: int, regrouping: Regrouping
) -> InstanceRecord | None:
    if instance.phase is not Phase.RUN:
        return None
    view = instance.view
    leaving = [
        rank
        for report in reports.values()
        for rank, told in report.ranks.items()
        if told.life is Life.LEAVING and instance.has(rank, told.incarnation)
    ]
    coming = joining(instance, reports)
    if not view.active and (regrouping.must_wait(instance, reports) or (view.epoch == 0 and len(coming) < first_view)):
        return None
    if not leaving and not coming:
        return None
    joined = view.without(leaving).joined_by(coming, epoch=view.epoch + 1)
    reasons = [f"rank {rank} left" for rank in sorted(leaving)]
    reasons += [f"rank {rank} joined as incarnation {coming[rank]}" for rank in sorted(coming)]
    return _with_view(instance, joined, _shortened(reasons))


def _after_accusations(instance: InstanceRecord, reports: Reports, judge_epoch: int) -> InstanceRecord | None:
    view = instance.view
    if judge_epoch != view.epoch or instance.condemned:
        return None
    told = _accusations(instance, reports)
    condemned = judge(view.active, told)
    if not condemned:
        return None
    reasons = [
        f"rank {rank} kept {_names(sorted({f'rank {a.accuser}' for a in told if a.suspect == rank}))} waiting"
        for rank in condemned
    ]
    return replace(instance, condemned=condemned, reason=_shortened(reasons))


def _accusations(instance: InstanceRecord, reports: Reports) -> list[Accusation]:
    return [a for report in reports.values() for a in report.accusations if a.epoch == instance.view.epoch]


def _with_grants(instance: InstanceRecord, reports: Reports, also: str) -> InstanceRecord:
    owners, granted = list(instance.owners), list(instance.granted)
    given: list[str] = []
    for host, report in sorted(reports.items()):
        for rank, told in report.ranks.items():
            if told.life is not Life.WANTED or rank in instance.view.active or not 0 <= rank < len(owners):
                continue
            owner = owners[rank]
            if owner == report.ident and granted[rank] > told.incarnation:
                continue  # the host has leave already and will find it in the record
            if owner not in ("", report.ident) and lives(owner, reports):
                continue  # another living supervisor has this rank
            owners[rank] = report.ident
            granted[rank] = next_incarnation(granted[rank], instance.view.incarnations[rank])
            given.append(f"{host} may launch rank {rank} as incarnation {granted[rank]}")
    if not given:
        return instance
    reason = _shortened([also, *given] if also else given)
    return replace(instance, owners=tuple(owners), granted=tuple(granted), reason=reason)


def _with_view(instance: InstanceRecord, view: View, reason: str) -> InstanceRecord:
    # An empty view has nothing to repair, so it runs at once and waits for joiners.
    phase = Phase.AGREED if view.active else Phase.RUN
    return replace(instance, view=view, phase=phase, condemned=(), reason=reason)


def _waiting_for(instance: InstanceRecord, reports: Reports, first_view: int, regrouping: Regrouping) -> str:
    """What comes first of all that is awaited: verdicts, then repair, then ranks on their way."""
    view = instance.view
    if instance.condemned:
        return f"{_ranks(instance.condemned)}, condemned, to exit"
    if accused := judge(view.active, _accusations(instance, reports)):
        return f"further accusations, before {_ranks(accused)} is judged in epoch {view.epoch}"
    if instance.phase is Phase.AGREED:
        return f"{_ranks(_unsettled(instance, reports))} to settle in epoch {view.epoch}"
    told = [(rank, each) for report in reports.values() for rank, each in report.ranks.items()]
    wait = regrouping.wait(instance, reports)
    awaited = (Life.STARTING, Life.RESTING) if wait is Timer.MAKE_DO else (Life.STARTING,)
    if coming := sorted({rank for rank, each in told if each.life in awaited}):
        return f"{_ranks(coming)} to get ready{_WHILE_WAITING.get(wait, '')}"
    if claimed := sorted({rank for rank, each in told if each.life is Life.WANTED}):
        return f"{_ranks(claimed)} to be given up by another supervisor, which has the same"
    if not view.active:
        ready = len({rank for rank, each in told if each.life is Life.READY})
        if view.epoch == 0 and first_view > ready:
            return f"{first_view - ready} of the {first_view} ranks of the first view to get ready"
        return "a rank to be launched: none is in, and none is on its way"
    return f"nothing: {_ranks(view.active)} run, and no other rank is on its way"


_WHILE_WAITING: Mapping[Timer | None, str] = {
    Timer.REGROUP: ", for a moment: those that are ready suffice",
    Timer.MAKE_DO: ", for a while: those that are ready could serve only in part",
}


def _ranks(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"rank{'s' if len(ranks) > 1 else ''} {_names(names)}"


def _names(items: Iterable[str]) -> str:
    return ", ".join(items)


def _shortened(reasons: list[str], limit: int = 8) -> str:
    more = [f"{len(reasons) - limit} more"] if len(reasons) > limit else []
    return "; ".join(reasons[:limit] + more)
