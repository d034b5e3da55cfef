"""The operations of a server: those that wait, those that run, and the last that ended. Bounded; no I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from eep.errors import EepError
from eep.operations.instance_standing import InstanceStanding
from eep.operations.next_order import Order, OrdersDone, OrdersFailed
from eep.operations.operation_request import OperationRequest
from eep.operations.precedence import line_of, subject_of

MOST_WAITING = 16
MOST_ENDED = 256
ENDED = ("done", "failed")


class OperationConflict(EepError, ValueError):
    """The id names another operation."""


class TooManyOperations(EepError):
    """So many operations wait that no other is accepted. Ask again later."""


class ToldOperation(msgspec.Struct, frozen=True):
    """An operation as JSON has it. Times are in seconds since 1970."""

    id: str
    action: str
    rank: int | None
    ranks: int | None
    role: str | None
    deadline_s: float
    state: str
    reason: str
    retry: bool
    accepted_at: float
    ended_at: float | None
    orders: list[str]
    undone: list[str]


@dataclass
class Operation:
    """One operation. ``state`` is ``accepted``, ``running``, ``done`` or ``failed``."""

    request: OperationRequest
    accepted_at: float
    state: str = "accepted"
    reason: str = "it waits for its turn"
    retry: bool = False
    """Of one that failed: whether asking again, under another id, may help."""
    ended_at: float | None = None
    origin: InstanceStanding | None = None
    """How the instance stood when it began; None until then."""
    stop: OrdersFailed | None = None
    """How it is to end at once; None to let it go on."""
    is_replaced: bool = False
    """Another operation, which contradicts it, has taken its place. What it did is not taken back."""
    asked: set[str] = field(default_factory=set)
    """The names of the orders that were sent, whether they were answered or not."""
    touched: set[int] = field(default_factory=set)
    """The ranks that those are for."""
    orders: list[Order] = field(default_factory=list)
    undone: list[Order] = field(default_factory=list)
    """The orders that took back what an operation that failed had done."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def end(self, outcome: OrdersDone | OrdersFailed, now: float) -> None:
        self.state = "done" if isinstance(outcome, OrdersDone) else "failed"
        self.reason, self.ended_at = outcome.reason, now
        self.retry = isinstance(outcome, OrdersFailed) and outcome.retry

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        request = self.request
        told = ToldOperation(
            id=request.id,
            action=request.action,
            rank=request.rank,
            ranks=request.ranks,
            role=request.role,
            deadline_s=request.deadline_s,
            state=self.state,
            reason=self.reason,
            retry=self.retry,
            accepted_at=self.accepted_at,
            ended_at=self.ended_at,
            orders=[str(order) for order in self.orders],
            undone=[str(order) for order in self.undone],
        )
        return msgspec.structs.asdict(told)


class OperationTable:
    def __init__(self) -> None:
        self._all: OrderedDict[str, Operation] = OrderedDict()

    def get(self, ident: str) -> Operation | None:
        return self._all.get(ident)

    def unfinished(self) -> list[Operation]:
        """In the order in which they were accepted."""
        return [operation for operation in self._all.values() if not operation.has_ended]

    def ahead_of(self, operation: Operation) -> Operation | None:
        """The operation that one waits for; None if it is its turn, or it acts at once."""
        if subject_of(operation.request) is not None:
            return None
        first = next(each for each in self.unfinished() if subject_of(each.request) is None)
        return None if first is operation else first

    def beside(self, operation: Operation) -> list[Operation]:
        """The others about the same that act at once and have not ended."""
        subject = subject_of(operation.request)
        if subject is None:
            return []
        return [each for each in self.unfinished() if each is not operation and subject_of(each.request) == subject]

    def newest(self, most: int) -> list[Operation]:
        return list(self._all.values())[-most:]

    def submit(self, request: OperationRequest, now: float) -> tuple[Operation, bool]:
        """The operation of that id, and whether it is new. One that is there already is not begun again; its deadline stays
        as it is."""
        known = self._all.get(request.id)
        if known is not None:
            if _is_another(known.request, request):
                raise OperationConflict(
                    f"operation {request.id} is another one ({_named(known.request)}); choose another id"
                )
            return known, False
        line = line_of(request)
        if sum(line_of(each.request) == line for each in self.unfinished()) >= MOST_WAITING:
            raise TooManyOperations(f"{MOST_WAITING} operations wait already; ask again when one has ended")
        operation = self._all[request.id] = Operation(request, now)
        ended = [ident for ident, each in self._all.items() if each.has_ended]
        for ident in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._all[ident]
        return operation, True


def _is_another(known: OperationRequest, request: OperationRequest) -> bool:
    return msgspec.structs.replace(request, deadline_s=known.deadline_s) != known


def _named(request: OperationRequest) -> str:
    """What an operation is for, such as ``scale, ranks 6``."""
    told = {"rank": request.rank, "ranks": request.ranks, "role": request.role}
    return ", ".join([request.action, *(f"{name} {value}" for name, value in told.items() if value is not None)])
