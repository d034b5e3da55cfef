"""A step being taken: what handlers may do to the state, and what follows from it whatever happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eep.membership.coordination import decides, known_reports, next_move, regrouping_of
from eep.membership.effects import (
    Effect,
    Fence,
    Launch,
    ListReports,
    LossCause,
    Notify,
    PhaseChanged,
    Propose,
    Publish,
    RankGone,
    Reject,
    Revoke,
    SetTimer,
    Transition,
)
from eep.membership.events import Deadline, Timer
from eep.membership.news import why_revoked
from eep.membership.records import InstanceRecord, Phase
from eep.membership.state import (
    HostState,
    LocalRank,
    RankStatus,
    phase_name,
    report_of,
)

_REMEMBERED_OPERATIONS = 64


class Turn:
    """A step being taken: the state so far, and the effects so far."""

    def __init__(self, state: HostState) -> None:
        self.state = state
        self.effects: list[Effect] = []
        self._phase_before = phase_name(state)
        self._epoch_before = state.epoch

    # What handlers use.

    def update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def update_rank(self, rank: int, **changes: Any) -> None:
        self.update(ranks={**self.state.ranks, rank: replace(self.state.ranks[rank], **changes)})

    def do(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def reject(self, kind: str, reason: str) -> None:
        self.do(Reject(kind, reason))

    def log(self, phase: str, cause: str, rank: int = -1, evidence: str = "", operation: str = "") -> None:
        incarnation = self.state.ranks[rank].incarnation if rank in self.state.ranks else -1
        self.do(Transition(phase, self.state.epoch, cause, rank, incarnation, evidence, operation))

    def set_timer(self, timer: Timer, number: int, delay: float, rank: int = -1) -> None:
        self.do(SetTimer(Deadline(timer, number, rank), delay))

    def process(self, rank: int, incarnation: int, what: str) -> LocalRank | None:
        """The local rank whose process this is, or None, rejected, if it is no process of ours."""
        local = self.state.ranks.get(rank)
        if local is None:
            self.reject(
                "unknown-rank",
                f"{what} of rank {rank}, but this host has ranks {sorted(self.state.ranks)}",
            )
        elif local.incarnation != incarnation or not local.has_process:
            self.reject(
                "stale-incarnation",
                f"{what} of rank {rank} as incarnation {incarnation}, but the current one is "
                f"{local.incarnation} ({local.status.value}); a process that was replaced must end",
            )
        else:
            return local
        return None

    def revoke(self, reason: str, *, heard: bool = False) -> None:
        """This host's ranks cannot finish a step of this epoch any more. ``heard``: because another host said so, whose
        report will."""
        if not heard:
            self.update(told_revoked=max(self.state.told_revoked, self.state.epoch))
        if self.state.revoked < self.state.epoch:
            self.update(revoked=self.state.epoch)
            self.do(Revoke(self.state.epoch, reason))

    def fence(self, rank: int, reason: str, kind: LossCause, *, blameless: bool = False, failed: bool = False) -> None:
        local = self.state.ranks[rank]
        if not local.runs:
            return
        if self.state.is_in(rank):
            self.revoke(f"rank {rank} is being fenced: {reason}")
        self.update_rank(rank, status=RankStatus.FENCING, blameless=blameless)
        self.do(Fence(rank, local.incarnation, reason))
        self.say_gone(rank, local, reason, kind, failed=failed)
        self.log("FENCING", reason, rank)
        self.set_timer(Timer.FENCE, local.incarnation, self.state.policy.fence_deadline, rank)

    def say_gone(
        self, rank: int, before: LocalRank, cause: str, kind: LossCause = LossCause.EXIT, *, failed: bool = False
    ) -> None:
        """``before`` is the rank before its end was seen. If it no longer ran then, its end was told already."""
        if before.runs:
            left = before.status is RankStatus.LEAVING
            kind = LossCause.LEFT if left and kind is LossCause.EXIT else kind
            self.do(RankGone(rank, before.incarnation, cause, asked_to_leave=left, failed=failed, kind=kind))

    def adopt(self, instance: InstanceRecord | None, version: int) -> None:
        """Follow a record that was seen. Only a newer one changes anything."""
        known = self.state.instance
        if instance is None:
            return
        if instance.view.max_ranks != self.state.policy.max_ranks:
            self.reject(
                "wrong-capacity",
                f"the instance has room for {instance.view.max_ranks} ranks but this host was started for "
                f"{self.state.policy.max_ranks}; start it with the same max_ranks",
            )
            return
        if known is not None and instance.serial <= known.serial:
            if instance == known:
                self.update(version=max(version, self.state.version))
            elif instance.serial == known.serial:
                self.distrust(instance)
            return
        self.update(instance=instance, version=version, forgotten=False)
        if instance.view.epoch > self._epoch_before:
            reason = f"epoch {instance.view.epoch} is committed: {instance.reason}"
            self.do(Revoke(instance.view.epoch - 1, reason))
        self.do(Notify(instance.view, instance.phase))
        for rank in self.state.ranks:
            self._follow(instance, rank)
        if any(self.state.is_in(rank) for rank in self.state.ranks):
            self._expect_settling(instance)

    def _follow(self, instance: InstanceRecord, rank: int) -> None:
        """Bring one local rank in line with the record."""
        local, view, mine = self.state.ranks[rank], instance.view, instance.owners[rank] == self.state.ident
        if local.status is RankStatus.WANTED:
            if mine and instance.granted[rank] > local.incarnation and not self.state.stopping:
                self.update_rank(rank, status=RankStatus.STARTING, incarnation=instance.granted[rank], settled=-1)
                self.do(Launch(rank, instance.granted[rank], instance.reason))
                self.log("STARTING", "the coordinator gave leave to launch", rank)
                self.set_timer(Timer.START, instance.granted[rank], self.state.policy.start_deadline, rank)
            elif instance.owners[rank] and not mine and rank in view.active:
                self.reject(
                    "rank-claimed",
                    f"rank {rank} belongs to {instance.owners[rank]}; give this host other ranks, or stop that one",
                )
        elif not mine or instance.granted[rank] != local.incarnation:
            self.fence(rank, f"rank {rank} now belongs to {instance.owners[rank]}", LossCause.OUTSIDE, blameless=True)
        elif self.state.is_in(rank):
            if rank in instance.condemned:
                self.fence(rank, instance.reason, LossCause.SUSPECTED)
            elif not (local.runs or local.status is RankStatus.FENCING):
                self.revoke(f"rank {rank} is in epoch {view.epoch} but dead")
            elif instance.phase is Phase.RUN:
                self.set_timer(Timer.STABLE, local.incarnation, self.state.policy.stable_after, rank)
        elif local.runs and view.incarnations[rank] >= local.incarnation:
            if local.status is RankStatus.LEAVING:
                self.set_timer(Timer.LEAVE, local.incarnation, self.state.policy.leave_grace, rank)
            else:
                why = f"rank {rank} is not in epoch {view.epoch}: {instance.reason}"
                self.fence(rank, why, LossCause.OUTSIDE, blameless=True)

    def _expect_settling(self, instance: InstanceRecord) -> None:
        if not self.state.leased:
            self.revoke("this host cannot rely on its lease")
        elif instance.phase is Phase.AGREED and instance.view.epoch > self._epoch_before:
            self.set_timer(Timer.SETTLE, instance.view.epoch, self.state.policy.settle_deadline)

    def distrust(self, found: InstanceRecord | None) -> None:
        """The store does not hold what it must: change nothing until it does."""
        known = self.state.instance
        assert known is not None
        what = f"record {found.serial} of epoch {found.view.epoch}" if found else "nothing at all"
        self.update(forgotten=True)
        self.reject(
            "store-forgot",
            f"the store holds {what}, but record {known.serial} of epoch {known.view.epoch} was committed; "
            "this host changes nothing until the store is restored or the job is started anew",
        )

    # What follows from the state, whatever happened.

    def finish(self) -> None:
        self._heed_news()
        self._publish()
        self._coordinate()
        phase = phase_name(self.state)
        if (phase, self.state.epoch) != (self._phase_before, self._epoch_before):
            self.do(PhaseChanged(phase, self.state.epoch))
            self.log(phase, self._cause_of(phase), operation=f"view-{_operation_epoch(phase, self.state)}")

    def _cause_of(self, phase: str) -> str:
        """Of a revoked epoch, what revoked it; of another phase, what its record says."""
        revoked = [effect.reason for effect in self.effects if isinstance(effect, Revoke)]
        if phase == "REVOKED" and revoked:
            return revoked[-1]
        return self.state.instance.reason if self.state.instance else ""

    def _heed_news(self) -> None:
        instance = self.state.instance
        if instance is None or not any(self.state.is_in(rank) for rank in self.state.ranks):
            return
        if self.state.revoked < instance.view.epoch and (why := why_revoked(instance, self.state.news)) is not None:
            self.revoke(why, heard=True)
            self.set_timer(Timer.NEWS, instance.view.epoch, self.state.policy.news_deadline)

    def _publish(self) -> None:
        if not self.state.leased:
            return
        report = report_of(self.state)
        if report != self.state.published:
            self.update(published=report)
            self.do(Publish(report))

    def _coordinate(self) -> None:
        if decides(self.state):
            self._time_the_judge()
            self._time_the_regrouping()
        move = next_move(self.state)
        if isinstance(move, ListReports):
            self.update(looking=True)
            self.do(move)
        elif isinstance(move, Propose):
            self.update(in_flight=move.instance.serial)
            self.do(move)

    def _time_the_judge(self) -> None:
        epoch = self.state.epoch
        accusations = [a for report in known_reports(self.state).values() for a in report.accusations]
        if self.state.judging < epoch and any(a.epoch == epoch for a in accusations):
            self.update(judging=epoch)
            self.set_timer(Timer.JUDGE, epoch, self.state.policy.judge_after)

    def _time_the_regrouping(self) -> None:
        state, instance = self.state, self.state.instance
        assert instance is not None
        wait = regrouping_of(state).wait(instance, known_reports(state))
        if wait is Timer.REGROUP and state.regrouping < state.epoch:
            self.update(regrouping=state.epoch)
            self.set_timer(wait, state.epoch, state.policy.regroup_after)
        elif wait is Timer.MAKE_DO and state.making_do < state.epoch:
            self.update(making_do=state.epoch)
            self.set_timer(wait, state.epoch, state.policy.make_do_after)

    def remember(self, operation: str) -> bool:
        """Whether an operator's request is new; from now on it is not."""
        if operation in self.state.operations:
            return False
        self.update(operations=(*self.state.operations, operation)[-_REMEMBERED_OPERATIONS:])
        return True


def _operation_epoch(phase: str, state: HostState) -> int:
    # All lines of one view change carry the epoch it leads to.
    return state.epoch + 1 if phase == "REVOKED" else state.epoch
