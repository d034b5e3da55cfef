"""What the front end tells ranks beside requests. All of it travels as abort messages, which every rank gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eep.operations.operation_request import RoleName
from sglang_patches.addressed_life import MOVED_AWAY, RENEWED, REVOKED, ROLE


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class RankOrders:
    """``drop(wire)`` makes the rank that serves it stop, and all whose id begins so. ``revoke(wire)`` makes a rank that has
    not begun it not begin it. ``move_away(wire)`` makes a rank stop this one: it goes on elsewhere. ``renew()`` makes all
    ranks stop what they serve, and send to the next detokenizer. ``tell_role(rank, role)`` tells a rank what it serves."""

    drop: Callable[[str], None] = _nothing
    revoke: Callable[[str], None] = _nothing
    move_away: Callable[[str], None] = _nothing
    renew: Callable[[], None] = _nothing
    tell_role: Callable[[int, RoleName], None] = _nothing

    @classmethod
    def through(cls, send: Callable[[Any], None]) -> RankOrders:
        """``send`` sends a message to the controller."""
        from sglang.srt.managers.io_struct import AbortReq

        def order(text: str) -> Callable[[str], None]:
            return lambda wire: send(AbortReq(rid=wire, abort_message=text))

        return cls(
            drop=lambda wire: send(AbortReq(rid=wire)),
            revoke=order(REVOKED),
            move_away=order(MOVED_AWAY),
            renew=lambda: send(AbortReq(rid="", abort_all=True, abort_message=RENEWED)),
            tell_role=lambda rank, role: send(AbortReq(rid=str(rank), abort_message=f"{ROLE}{role}")),
        )
