"""The instructions and the status of a fault-tolerance API that is proposed for SGLang (RFC 22344, pull request 40078).

An orchestrator that speaks it sees each rank as an engine. It may have engines taken out for good (``scale_down``), or have
the others go on after a fault (``retry``). Ranks with EEP always go on by themselves. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eep.operations.instance_standing import InstanceStanding
from eep.operations.operation_request import MOST_BYTES, BadOperation, OperationRequest
from eep.operations.operation_table import MOST_WAITING

INSTRUCTIONS = ("retry", "scale_down")
SCHEMA = 1
_RequestName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{0,48}$(?!\n)")]
_Removed = Annotated[tuple[Annotated[int, Meta(ge=0, lt=65536)], ...], Meta(min_length=1, max_length=MOST_WAITING)]


class _FaultParams(msgspec.Struct, frozen=True):
    """Fields that are not known here are left alone: the form is a proposal."""

    removed_dp_ranks: _Removed | None = None


class FaultInstruction(msgspec.Struct, frozen=True):
    """``request_id`` names it: asking again with it does nothing twice. An empty one is as if it were left out."""

    instruction: str
    params: _FaultParams = _FaultParams()
    request_id: _RequestName = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are to go."""
        return tuple(sorted(set(self.params.removed_dp_ranks or ())))

    def operations(self) -> tuple[OperationRequest, ...]:
        """What is done about it."""
        return tuple(OperationRequest(f"ft:{self.request_id}:{rank}", "remove", rank) for rank in self.ranks)


def parse_instruction(body: bytes) -> FaultInstruction:
    """The instruction in ``body``, which is JSON. :class:`BadOperation` says what is wrong with it."""
    if len(body) > MOST_BYTES:
        raise BadOperation(f"the request has {len(body)} bytes; at most {MOST_BYTES} are read")
    try:
        given = msgspec.json.decode(body, type=FaultInstruction)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadOperation(f"this is no instruction: {error}") from error
    if given.instruction not in INSTRUCTIONS:
        raise BadOperation(f"{given.instruction[:64]!r} is no instruction here; there are {', '.join(INSTRUCTIONS)}")
    if (given.instruction == "scale_down") is (given.params.removed_dp_ranks is None):
        wanted = "needs" if given.instruction == "scale_down" else "takes no"
        raise BadOperation(f"{given.instruction} {wanted} 'removed_dp_ranks', the numbers of ranks")
    return given


def why_not_possible(given: FaultInstruction, now: InstanceStanding) -> str | None:
    """Why an instruction is not even begun; None if it may be. So one on several ranks does not fail half-way for it."""
    if unknown := [rank for rank in given.ranks if rank not in now.ranks]:
        return f"this host has no ranks {unknown}; it has ranks {sorted(now.ranks)}"
    stay = [rank for rank in now.kept if rank not in given.ranks]
    if given.ranks and len(stay) < (fewest := now.needed):
        return f"{len(stay)} ranks would stay, and it takes {fewest}"
    return None


EngineState = Literal["healthy", "unhealthy", "dead"]


def describe_engines(status: Mapping[str, Any], last: str) -> dict[str, Any]:
    """What the status of an instance is in the form of the proposal: its ranks that serve, or did. ``last``: the name of the
    instruction that ended last."""
    ranks = {int(number): told for number, told in status["ranks"].items()}
    there = {number: ranks[number] for number in sorted(ranks) if _was_ever(ranks[number])}
    return {
        "schema_version": SCHEMA,
        "total_engines": len(there),
        "engines": [{"id": number, "status": _state_of(told)} for number, told in there.items()],
        "last_ft_request_id": last,
    }


def _was_ever(told: Mapping[str, Any]) -> bool:
    return bool(told["incarnation"] >= 0 or told["wanted"])


def _state_of(told: Mapping[str, Any]) -> EngineState:
    if told["in"]:
        return "healthy"
    return "dead" if told["pid"] is None else "unhealthy"
