"""An instance of four ranks, with room for six, that does what it is told: a stand-in for a supervisor and a front end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from eep.operations.instance_standing import InstanceStanding, RankStanding
from eep.operations.next_order import Order
from eep.operations.operation_request import OperationRequest
from eep.operations.operation_runner import OrderRefused

SERVES = RankStanding("ready", 0, True)
DOWN = RankStanding("down", -1, False, wanted=False)


def standing(serve: int = 4, room: int = 6, **fields: object) -> InstanceStanding:
    ranks = {rank: SERVES if rank < serve else DOWN for rank in range(room)}
    return replace(InstanceStanding("RUN", ranks, fewest_ranks=3), **fields)  # type: ignore[arg-type]


def with_rank(now: InstanceStanding, rank: int, **fields: object) -> InstanceStanding:
    return replace(now, ranks={**now.ranks, rank: replace(now.ranks[rank], **fields)})  # type: ignore[arg-type]


def asks(
    action: str,
    rank: int | None = None,
    ranks: int | None = None,
    deadline_s: float = 5.0,
    role: str | None = None,
) -> OperationRequest:
    return OperationRequest("op", action, rank, ranks, deadline_s, role)  # type: ignore[arg-type]


class Instance:
    """``broken`` ranks never get in."""

    def __init__(self, now: InstanceStanding | None = None, broken: tuple[int, ...] = (), silent: int = 0) -> None:
        self.now, self.broken = now or standing(), broken
        self.silent = silent
        """So many questions get no answer."""
        self.given: list[tuple[str, Order]] = []
        self.refuse: str | None = None
        self.known: set[str] = set()
        """The names that orders came with."""
        self.lost_orders = 0
        """So many orders do not arrive."""
        self.slow: tuple[int, ...] = ()
        """These ranks take until :meth:`settle` to leave."""

    async def standing(self) -> InstanceStanding:
        await asyncio.sleep(0)
        if self.silent:
            self.silent -= 1
            raise ConnectionError("no supervisor answers")
        return self.now

    async def give(self, order: Order, name: str) -> bool:
        if self.refuse is not None:
            raise OrderRefused(self.refuse)
        if name in self.known:
            return False
        if self.lost_orders:
            self.lost_orders -= 1
            raise ConnectionError("no supervisor answers")
        self.known.add(name)
        self.given.append((name, order))
        rank = order.rank
        match order.action:
            case "remove":
                self.now = with_rank(self.now, rank, status="leaving", wanted=False)
                if rank not in self.slow:
                    self.settle(rank)
            case "launch":
                life = self.now.ranks[rank].incarnation + 1
                fields = {"status": "ready", "is_in": True, "incarnation": life, "wanted": True}
                if rank in self.broken:
                    fields = {"status": "resting", "failures": 3, "incarnation": life, "wanted": True}
                self.now = with_rank(self.now, rank, **fields)
            case "kill" | "drill":
                self.now = with_rank(self.now, rank, incarnation=self.now.ranks[rank].incarnation + 1)
            case "experts" | "both":
                self.now = with_rank(self.now, rank, role=order.action)
            case "drain":
                self.now = replace(self.now, draining=True)
            case "undrain":
                self.now = replace(self.now, draining=False)
        return True

    def settle(self, rank: int) -> None:
        self.now = with_rank(self.now, rank, status="down", is_in=False)
