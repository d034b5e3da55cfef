"""Operations on this server: those of its supervisor, and draining and roles, which are the front end's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eep.operations.instance_standing import InstanceStanding
from eep.operations.next_order import Order
from eep.operations.operation_runner import OrderRefused
from eep.operations.role_file import write_roles
from eep.operations.supervisor_access import SupervisorAccess
from sglang_patches.api.server_status import ServerStatus


class ServerAccess:
    """See :class:`eep.operations.operation_runner.InstanceAccess`."""

    def __init__(self, directory: Path, status: ServerStatus, front_end: Callable[[], Any]) -> None:
        self._supervisor, self._status, self._front_end = SupervisorAccess(directory), status, front_end
        self._directory = directory

    async def standing(self) -> InstanceStanding:
        # An answer from before the last order would be taken for what came of it.
        return InstanceStanding.of(await self._status.host(fresh=True))

    async def give(self, order: Order, name: str) -> bool:
        if order.action not in ("drain", "undrain", "experts", "both"):
            return await self._supervisor.give(order, name)
        front_end = self._front_end()
        if front_end is None:
            raise OrderRefused("the server has not begun to serve yet")
        if order.action in ("drain", "undrain"):
            front_end.service.draining = order.action == "drain"
        else:
            front_end.set_role(order.rank, order.action)
            write_roles(self._directory, front_end.ranks.experts_only)
        return True
