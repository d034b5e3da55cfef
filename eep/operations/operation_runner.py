"""Carries operations out: asks where an instance stands, gives the orders that follow from it, and takes back what failed."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from eep.operations.instance_standing import InstanceStanding
from eep.operations.next_order import (
    Order,
    OrdersDone,
    OrdersFailed,
    OrdersWait,
    effect_of,
    must_wait,
    next_step,
    undo,
    why_refused,
)
from eep.operations.operation_request import OperationRequest
from eep.operations.operation_table import Operation, OperationTable
from eep.operations.precedence import takes_place_of

LOOKS_EVERY = 0.1
TAKEN_BACK_WITHIN_S = 60.0
"""How long an operation that failed may take to leave the instance as it was."""
_MOST_ORDERS = 4096

logger = logging.getLogger(__name__)


class OrderRefused(Exception):
    """An order was not carried out, and changed nothing."""


class InstanceAccess(Protocol):
    """How operations see and change an instance. Both calls end within seconds; ``OSError``: ask again."""

    async def standing(self) -> InstanceStanding: ...

    async def give(self, order: Order, name: str) -> bool:
        """Raises :class:`OrderRefused`. The same ``name`` again does nothing twice; False if it was known already."""


def order_name(ident: str, order: Order, number: int = 0) -> str:
    """The name of an order of an operation: the same for whoever carries the operation out."""
    return f"{ident}/{order.action}/{order.rank}/{number}"


class OperationRunner:
    """Call it from the thread of one event loop."""

    def __init__(
        self,
        instance: InstanceAccess,
        looks_every: float = LOOKS_EVERY,
        taken_back_within: float = TAKEN_BACK_WITHIN_S,
    ) -> None:
        self.table = OperationTable()
        self._instance, self._looks_every, self._taken_back_within = instance, looks_every, taken_back_within
        self._one_decides = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: OperationRequest) -> tuple[Operation, bool]:
        """See :meth:`OperationTable.submit`. Its deadline counts from now on, also while it waits for its turn."""
        operation, is_new = self.table.submit(request, time.time())
        if is_new:
            for older in self.table.beside(operation):
                if takes_place_of(request, older.request):
                    older.is_replaced = True
                    older.stop = OrdersFailed(f"operation {request.id} ({request.action}) took its place", retry=True)
            task = asyncio.ensure_future(self._conduct(operation, time.monotonic() + request.deadline_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return operation, is_new

    def cancel(self, ident: str) -> Operation | None:
        """End an operation, and take back what it did. One that has ended stays as it is. None: there is none of that id."""
        operation = self.table.get(ident)
        if operation is not None and operation.stop is None:
            operation.stop = OrdersFailed("it was cancelled", retry=True)
        return operation

    async def _conduct(self, operation: Operation, until: float) -> None:
        ident, action = operation.request.id, operation.request.action
        outcome: OrdersDone | OrdersFailed
        try:
            outcome = await self._carry_out(operation, until)
        except Exception as error:  # an error of ours must not keep the operations behind it waiting
            logger.exception("eep: operation %s", ident)
            outcome = OrdersFailed(f"{type(error).__name__}: {error}", retry=False)
        if isinstance(outcome, OrdersFailed):
            outcome = await self._take_back(operation, outcome)
        operation.end(outcome, time.time())
        logger.info("eep: operation %s (%s) %s: %s", ident, action, operation.state, operation.reason)

    async def _carry_out(self, operation: Operation, until: float) -> OrdersDone | OrdersFailed:
        while operation.stop is None:
            ahead = self.table.ahead_of(operation)
            if ahead is not None:
                operation.reason = f"it waits for operation {ahead.request.id} ({ahead.request.action})"
            else:
                if operation.state == "accepted":
                    operation.state, operation.reason = "running", "it begins"
                outcome = await self._advance(operation)
                if outcome is not None:
                    return outcome
            if len(operation.orders) > _MOST_ORDERS or time.monotonic() >= until:
                why = f"not done within {operation.request.deadline_s:g} s: {operation.reason}"
                return OrdersFailed(why, retry=True)
            await asyncio.sleep(self._looks_every)
        return operation.stop

    async def _advance(self, operation: Operation) -> OrdersDone | OrdersFailed | None:
        """Look, and do what follows. None: it is to go on."""
        request = operation.request
        async with self._deciding(operation):
            try:
                now = await self._instance.standing()
            except OSError as error:
                operation.reason = str(error)
                return None
            if operation.stop is not None:
                return operation.stop
            if operation.origin is None:
                if (refused := why_refused(request, now)) is not None:
                    return refused
                # What those about the same have changed is not what was there before.
                before = [each.origin for each in self.table.beside(operation) if each.origin is not None]
                operation.origin = before[0] if before else now
            match next_step(request, operation.origin, now, tuple(operation.orders)):
                case Order() as order:
                    return await self._give(operation, order)
                case OrdersWait(reason):
                    operation.reason = reason
                    return None
                case outcome:
                    return outcome

    def _deciding(self, operation: Operation) -> AbstractAsyncContextManager[object]:
        """Two that took the last ranks of a kind could each find the other's there. Draining takes no rank, and must not wait
        for a supervisor that is slow to answer."""
        return nullcontext() if operation.request.action in ("drain", "undrain") else self._one_decides

    async def _give(self, operation: Operation, order: Order) -> OrdersFailed | None:
        name = order_name(operation.request.id, order, operation.orders.count(order))
        is_ours = name in operation.asked
        operation.asked.add(name)
        operation.touched.add(order.rank)
        try:
            is_new = await self._instance.give(order, name)
        except OrderRefused as error:
            return OrdersFailed(str(error), retry=True)
        except OSError as error:
            operation.reason = str(error)  # the same order again, under the same name
            return None
        if not (is_new or is_ours):
            operation.touched.discard(order.rank)
            ident = operation.request.id
            return OrdersFailed(
                f"an operation {ident} was carried out before, and nothing is done twice; choose another id", retry=True
            )
        operation.orders.append(order)
        return None

    async def _take_back(self, operation: Operation, outcome: OrdersFailed) -> OrdersFailed:
        """How it ends: what could not be taken back is named in the reason."""
        rivals = [each for each in self.table.beside(operation) if each.stop is None]
        if operation.origin is None or operation.is_replaced or rivals:
            return outcome
        operation.reason = f"it is taken back: {outcome.reason}"
        try:
            left = await self._undo_all(operation, operation.origin)
        except Exception as error:
            logger.exception("eep: operation %s", operation.request.id)
            left = [f"{type(error).__name__}: {error}"]
        if not left:
            return outcome
        logger.warning("eep: operation %s could not be taken back: %s", operation.request.id, "; ".join(left))
        return OrdersFailed(f"{outcome.reason}; not taken back yet: {'; '.join(left)}", outcome.retry)

    async def _undo_all(self, operation: Operation, origin: InstanceStanding) -> list[str]:
        """What is left in the end. It waits until the orders have had their effect."""
        until, given_up = time.monotonic() + self._taken_back_within, dict[Order, str]()
        while True:
            waits = await self._undo_some(operation, origin, given_up)
            failed = [f"{order}: {why}" for order, why in given_up.items()]
            if not waits or time.monotonic() >= until:
                return [*failed, *waits]
            await asyncio.sleep(self._looks_every)

    async def _undo_some(self, operation: Operation, origin: InstanceStanding, given_up: dict[Order, str]) -> list[str]:
        """One look, and the orders that follow from it. What is still to come is answered; what will not, goes to
        ``given_up``."""
        async with self._deciding(operation):
            try:
                now = await self._instance.standing()
            except OSError as error:
                return [str(error)]
            waits = []
            for order in undo(operation.request, origin, now, operation.touched):
                if order in given_up or order in operation.undone:
                    continue
                if (early := must_wait(order, now)) is not None:
                    waits.append(f"{order}: {early.reason}")
                    continue
                try:
                    await self._instance.give(order, order_name(f"{operation.request.id}/undo", order))
                except OrderRefused as error:
                    given_up[order] = str(error)
                except OSError as error:
                    waits.append(f"{order}: {error}")
                else:
                    operation.undone.append(order)
                    waits.append(f"{order}: it was only asked for")
        if waits:
            return waits
        for order in operation.undone:
            match effect_of(order, now):
                case OrdersWait(reason):
                    waits.append(f"{order}: {reason}")
                case OrdersFailed(reason):
                    given_up[order] = reason
        return waits
