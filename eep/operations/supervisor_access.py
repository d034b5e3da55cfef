"""Operations on the instance of a supervisor, by its private directory. A front end adds what only it can do."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import ASKED_BEFORE, AskOperation
from eep.operations.host_status import read_status
from eep.operations.instance_standing import InstanceStanding
from eep.operations.next_order import Order
from eep.operations.operation_runner import OrderRefused


class SupervisorAccess:
    """See :class:`eep.operations.operation_runner.InstanceAccess`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def standing(self) -> InstanceStanding:
        return InstanceStanding.of(await asyncio.to_thread(read_status, self._directory))

    async def give(self, order: Order, name: str) -> bool:
        match order.action:
            case "remove" | "launch" | "kill":
                asked = AskOperation(name, order.action, order.rank)
                answer = await asyncio.to_thread(ask_supervisor, self._directory, asked)
                if not answer.ok:
                    raise OrderRefused(answer.body)
                return answer.body != ASKED_BEFORE
            case "drill":
                await asyncio.to_thread(self._end_process, order.rank)
                return True
            case _:
                raise OrderRefused(f"only the server itself can {order.action}: ask it by its URL")

    def _end_process(self, rank: int) -> None:
        """With a signal from outside, as in a drill."""
        status = read_status(self._directory)
        pid = status["ranks"][str(rank)]["pid"]
        if pid is None or not status["faults_allowed"]:
            raise OrderRefused(f"rank {rank} has no process now")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise OrderRefused(f"rank {rank} has no process now") from None
