"""What a host does about the record now: propose the next one, look again, or wait; and what it waits for.

A pure function of the state, so that :func:`waiting_for` tells an operator what really holds a change back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eep.membership.decide import Unchanged, decide
from eep.membership.effects import ListReports, Propose
from eep.membership.events import EVERY_HOST
from eep.membership.news import brought_up_to_date
from eep.membership.records import InstanceRecord, Report
from eep.membership.regrouping import Regrouping
from eep.membership.state import HostState, coordinator_missing, is_coordinator, must_look_again, report_of


def next_move(state: HostState) -> Propose | ListReports | Unchanged:
    """What follows from the state. :class:`Unchanged` when this host has nothing to do but to wait."""
    if (held := _held_back(state)) is not None:
        return Unchanged(held)
    instance = state.instance
    if instance is None:
        return Propose(InstanceRecord.founded(state.ident, state.policy.max_ranks), 0)
    if must_look_again(state):
        return Unchanged("the store to list the reports again") if state.looking else ListReports()
    if coordinator_missing(state):
        reason = f"{state.ident} took over from {instance.coordinator}, whose lease ended"
        serial = instance.serial + 1
        return Propose(replace(instance, serial=serial, coordinator=state.ident, reason=reason), state.version)
    if not is_coordinator(state):
        return Unchanged(f"the coordinator, {instance.coordinator}, to decide")
    if state.scope != EVERY_HOST:
        return Unchanged("the store to list the reports of every host")
    decided = decide(
        instance,
        known_reports(state),
        judge_epoch=state.judged,
        first_view=state.policy.first_view,
        regrouping=regrouping_of(state),
    )
    return decided if isinstance(decided, Unchanged) else Propose(decided, state.version)


def waiting_for(state: HostState) -> str:
    """What the next change of the record waits for, in plain words."""
    move = next_move(state)
    return move.waiting_for if isinstance(move, Unchanged) else "this host to propose the next record"


def decides(state: HostState) -> bool:
    """Whether this host is to turn reports into the next record now."""
    return (
        _held_back(state) is None and is_coordinator(state) and state.scope == EVERY_HOST and not must_look_again(state)
    )


def regrouping_of(state: HostState) -> Regrouping:
    policy = state.policy
    return Regrouping(policy.fewest_ranks, policy.enough_ranks, state.regrouped, state.made_do)


def known_reports(state: HostState) -> Mapping[str, Report]:
    """Our own report counts before it is in the store, and so does what other hosts said directly. That saves a round trip
    when a rank died."""
    return {**brought_up_to_date(state.reports, state.news), state.host: report_of(state)}


def _held_back(state: HostState) -> str | None:
    if not state.leased:
        return "the store to confirm the lease of this host"
    if state.in_flight:
        return f"the store to answer the proposal of record {state.in_flight}"
    if state.forgotten:
        return "the store to be restored: it lost records that were committed"
    if state.instance is None and state.stopping:
        return "this supervisor to end"
    if state.instance is None and state.scope != EVERY_HOST:
        return "the store to list the reports of every host"
    return None
