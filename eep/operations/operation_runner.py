"""Carries operations out, one at a time: asks where the instance stands, and gives the orders that follow from it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from eep.operations.instance_standing import InstanceStanding
from eep.operations.next_order import Order, OrdersDone, OrdersFailed, OrdersWait, next_step, undo, why_refused
from eep.operations.operation_request import OperationRequest
from eep.operations.operation_table import Operation, OperationTable

LOOKS_EVERY = 0.1
_MOST_ORDERS = 4096

logger = logging.getLogger(__name__)


class OrderRefused(Exception):
    """An order was not carried out, and changed nothing."""


class InstanceAccess(Protocol):
    """How operations see and change an instance. Both calls end within seconds; ``OSError``: ask again."""

    async def standing(self) -> InstanceStanding: ...

    async def give(self, order: Order, name: str) -> None:
        """Raises :class:`OrderRefused`. The same ``name`` again does nothing twice."""


class OperationRunner:
    """Call it from the thread of one event loop."""

    def __init__(self, instance: InstanceAccess, looks_every: float = LOOKS_EVERY) -> None:
        self.table = OperationTable()
        self._instance, self._looks_every = instance, looks_every
        self._task: asyncio.Task[None] | None = None

    def submit(self, request: OperationRequest) -> tuple[Operation, bool]:
        """See :meth:`OperationTable.submit`. A new operation runs when those before it have ended."""
        operation, is_new = self.table.submit(request, time.time())
        if is_new and (self._task is None or self._task.done()):
            self._task = asyncio.ensure_future(self._run_all())
        return operation, is_new

    async def _run_all(self) -> None:
        while waiting := self.table.unfinished():
            operation = waiting[0]
            operation.state, operation.reason = "running", "it begins"
            try:
                outcome = await self._run(operation)
            except Exception as error:  # an error of ours must not keep the operations behind it waiting
                logger.exception("eep: operation %s", operation.request.id)
                outcome = OrdersFailed(f"{type(error).__name__}: {error}", retry=False)
            operation.end(outcome, time.time())
            logger.info(
                "eep: operation %s (%s) %s: %s",
                operation.request.id,
                operation.request.action,
                operation.state,
                operation.reason,
            )

    async def _run(self, operation: Operation) -> OrdersDone | OrdersFailed:
        request = operation.request
        until = time.monotonic() + request.deadline_s
        origin = await self._standing(operation, until)
        if origin is None:
            return OrdersFailed("the supervisor does not answer", retry=True)
        refused = why_refused(request, origin)
        if refused is not None:
            return refused
        outcome = await self._carry_out(operation, origin, until)
        if isinstance(outcome, OrdersFailed):
            await self._undo(operation, origin)
        return outcome

    async def _carry_out(
        self, operation: Operation, origin: InstanceStanding, until: float
    ) -> OrdersDone | OrdersFailed:
        request, now = operation.request, origin
        while True:
            match next_step(request, origin, now, tuple(operation.orders)):
                case OrdersDone() | OrdersFailed() as outcome:
                    return outcome
                case OrdersWait(reason):
                    operation.reason = reason
                case Order() as order:
                    try:
                        await self._instance.give(order, f"{request.id}/{len(operation.orders)}")
                    except OrderRefused as error:
                        return OrdersFailed(str(error), retry=True)
                    except OSError as error:
                        operation.reason = str(error)  # the same order again, under the same name
                    else:
                        operation.orders.append(order)
            if len(operation.orders) > _MOST_ORDERS or time.monotonic() >= until:
                return OrdersFailed(f"not done within {request.deadline_s:g} s: {operation.reason}", retry=True)
            await asyncio.sleep(self._looks_every)
            seen = await self._standing(operation, until)
            now = now if seen is None else seen

    async def _undo(self, operation: Operation, origin: InstanceStanding) -> None:
        """Each order once: what cannot be taken back is named in the reason."""
        for number, order in enumerate(undo(operation.request, origin, await self._latest(origin))):
            try:
                await self._instance.give(order, f"{operation.request.id}/undo/{number}")
                operation.undone.append(order)
            except (OrderRefused, OSError) as error:
                logger.warning("eep: operation %s could not be taken back: %s", operation.request.id, error)

    async def _latest(self, otherwise: InstanceStanding) -> InstanceStanding:
        try:
            return await self._instance.standing()
        except OSError:
            return otherwise

    async def _standing(self, operation: Operation, until: float) -> InstanceStanding | None:
        while True:
            try:
                return await self._instance.standing()
            except OSError as error:
                operation.reason = str(error)
            if time.monotonic() >= until:
                return None
            await asyncio.sleep(self._looks_every)
