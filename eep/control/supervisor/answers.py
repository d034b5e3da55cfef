"""What a supervisor answers to ranks and operators, from its state alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eep.control.wire.messages import AskEvidence, AskOperation
from eep.membership import (
    Action,
    Event,
    EvidenceGiven,
    HostState,
    OperatorAsked,
    RankStatus,
    host_of,
    missing_links,
    phase_name,
    waiting_for,
    why_it_must_stay,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    kind: str
    """By which refusals are counted."""
    reason: str


def why_not_registered(state: HostState, rank: int, incarnation: int) -> str | None:
    """Why a process may not register as this incarnation of a rank; None if it may."""
    local = state.ranks.get(rank)
    if local is None:
        return f"rank {rank} is not of this host, which has ranks {sorted(state.ranks)}"
    if local.incarnation != incarnation or not local.has_process:
        return (
            f"incarnation {incarnation} of rank {rank} is not the one that runs "
            f"({local.incarnation}, {local.status.value}); a process that was replaced must end"
        )
    return None


def why_not_done(state: HostState, request: AskOperation | AskEvidence) -> Refusal | None:
    """Why a request from outside is not carried out; None if it is."""
    if request.rank not in state.ranks:
        most = state.policy.max_ranks
        reason = f"rank {request.rank} is not of this host, which has ranks {sorted(state.ranks)}"
        reason += f"; there is room for {most} ranks, 0 to {most - 1}" if request.rank >= most else ""
        return Refusal("unknown-rank", reason)
    if isinstance(request, AskEvidence):
        return None
    if request.action == Action.REMOVE.value and (needed := why_it_must_stay(state, request.rank)) is not None:
        return Refusal("too-few", needed)
    return None


def event_of(request: AskOperation | AskEvidence) -> Event:
    """What a request from outside is to the core."""
    if isinstance(request, AskEvidence):
        return EvidenceGiven(request.operation, request.rank, request.evidence, request.fatal)
    return OperatorAsked(request.operation, Action(request.action), request.rank)


def comes_back(state: HostState, rank: int) -> bool:
    """Whether a rank runs, or will run again without an operator who asks for it."""
    local = state.ranks.get(rank)
    return local is not None and local.status is not RankStatus.DOWN


def _other_hosts(state: HostState) -> dict[str, list[int]]:
    """The ranks of each other host that are in."""
    found: dict[str, list[int]] = {}
    if state.instance is not None:
        for rank in state.instance.view.active:
            if rank not in state.ranks:
                found.setdefault(host_of(state.instance.owners[rank]), []).append(rank)
    return found


def describe_host(
    state: HostState,
    pids: Mapping[int, int],
    still_for: Callable[[int], float | None],
    since: Mapping[int, float],
) -> dict[str, Any]:
    """Membership as this host sees it, and its own ranks."""
    instance = state.instance
    return {
        "phase": phase_name(state),
        "epoch": state.epoch,
        "active": instance.view.active if instance else (),
        "coordinator": instance.coordinator if instance else None,
        "reason": instance.reason if instance else None,
        "waiting_for": waiting_for(state),
        "leased": state.leased,
        "max_ranks": state.policy.max_ranks,
        "fewest_ranks": state.policy.fewest_ranks,
        "other_hosts": _other_hosts(state),
        "missing_links": [host_of(ident) for ident in missing_links(state)],
        "ranks": {
            rank: {
                "status": local.status.value,
                "incarnation": local.incarnation,
                "in": state.is_in(rank),
                "pid": pids.get(rank),
                "since": since.get(rank),
                "wanted": local.keep,
                "failures": local.failures,
                "still_for": still_for(rank),
            }
            for rank, local in state.ranks.items()
        },
    }
