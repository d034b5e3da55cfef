"""The operations of a server: those that wait, the one that runs, and the last that ended. Bounded; no I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from eep.errors import EepError
from eep.operations.next_order import Order, OrdersDone, OrdersFailed
from eep.operations.operation_request import OperationRequest

MOST_WAITING = 16
MOST_ENDED = 256
ENDED = ("done", "failed")


class OperationConflict(EepError, ValueError):
    """The id names another operation."""


class TooManyOperations(EepError):
    """So many operations wait that no other is accepted. Ask again later."""


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
    orders: list[Order] = field(default_factory=list)
    undone: list[Order] = field(default_factory=list)
    """The orders that took back what an operation that failed had done."""

    def end(self, outcome: OrdersDone | OrdersFailed, now: float) -> None:
        self.state = "done" if isinstance(outcome, OrdersDone) else "failed"
        self.reason, self.ended_at = outcome.reason, now
        self.retry = isinstance(outcome, OrdersFailed) and outcome.retry

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        request = self.request
        return {
            "id": request.id,
            "action": request.action,
            "rank": request.rank,
            "ranks": request.ranks,
            "state": self.state,
            "reason": self.reason,
            "retry": self.retry,
            "accepted_at": self.accepted_at,
            "ended_at": self.ended_at,
            "orders": [_told(order) for order in self.orders],
            "undone": [_told(order) for order in self.undone],
        }


def _told(order: Order) -> str:
    return order.action if order.rank < 0 else f"{order.action} {order.rank}"


class OperationTable:
    def __init__(self) -> None:
        self._all: OrderedDict[str, Operation] = OrderedDict()

    def get(self, ident: str) -> Operation | None:
        return self._all.get(ident)

    def unfinished(self) -> list[Operation]:
        """In the order in which they were accepted."""
        return [operation for operation in self._all.values() if operation.state not in ENDED]

    def newest(self, most: int) -> list[Operation]:
        return list(self._all.values())[-most:]

    def submit(self, request: OperationRequest, now: float) -> tuple[Operation, bool]:
        """The operation of that id, and whether it is new. One that is there already is not begun again."""
        known = self._all.get(request.id)
        if known is not None:
            if known.request != request:
                raise OperationConflict(
                    f"operation {request.id} is another one ({known.request.action}); choose another id"
                )
            return known, False
        if len(self.unfinished()) >= MOST_WAITING:
            raise TooManyOperations(f"{MOST_WAITING} operations wait already; ask again when one has ended")
        operation = self._all[request.id] = Operation(request, now)
        ended = [ident for ident, each in self._all.items() if each.state in ENDED]
        for ident in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._all[ident]
        return operation, True
