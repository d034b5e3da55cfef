"""An operation sees what came of its orders, however many others ask for the status at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from eep.operations.next_order import Order
from eep.operations.operation_runner import OrderRefused
from eep.operations.role_file import read_roles
from sglang_patches.api import server_status
from sglang_patches.api.server_access import ServerAccess
from sglang_patches.api.server_status import ServerStatus
from tests.sglang_patches.front_end.front_end_server import Server, TokenizedGenerateReqInput

RANK = {"status": "down", "incarnation": 0, "in": False, "failures": 0}


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    told: dict[str, Any] = {"phase": "RUN", "epoch": 1, "margin": None, "ranks": {"0": dict(RANK)}}
    monkeypatch.setattr(
        server_status, "read_status", lambda directory: {**told, "ranks": {"0": dict(told["ranks"]["0"])}}
    )
    return told


def access(front_end: Any = None) -> tuple[ServerAccess, ServerStatus]:
    status = ServerStatus(Path("/nowhere"), lambda: front_end, list, lambda rank: "cpu")
    return ServerAccess(Path("/nowhere"), status, lambda: front_end), status


def test_a_look_after_an_order_is_not_one_of_before(supervisor: dict[str, Any]) -> None:
    async def body() -> None:
        operations, status = access()
        assert (await status.host())["ranks"]["0"]["status"] == "down"
        supervisor["ranks"]["0"]["status"] = "wanted"
        assert (await status.host())["ranks"]["0"]["status"] == "down", "others may get an answer of a moment ago"
        assert (await operations.standing()).ranks[0].status == "wanted"

    asyncio.run(body())


def test_the_front_end_drains(supervisor: dict[str, Any]) -> None:
    async def body() -> None:
        front_end = Server().front_end
        front_end.send(TokenizedGenerateReqInput("a"))
        operations, _ = access(front_end)
        await operations.give(Order("drain"), "x/0")
        standing = await operations.standing()
        assert (standing.draining, standing.open_requests) == (True, 1)
        await operations.give(Order("undrain"), "y/0")
        assert not (await operations.standing()).draining
        with pytest.raises(OrderRefused):
            await access(None)[0].give(Order("drain"), "z/0")

    asyncio.run(body())


def test_the_front_end_gives_a_rank_its_role(supervisor: dict[str, Any], tmp_path: Path) -> None:
    async def body() -> None:
        front_end = Server().front_end
        operations = ServerAccess(tmp_path, access(front_end)[1], lambda: front_end)
        await operations.give(Order("experts", 0), "x/0")
        assert (await operations.standing()).ranks[0].role == "experts"
        assert read_roles(tmp_path) == {0}
        await operations.give(Order("both", 0), "y/0")
        assert (await operations.standing()).ranks[0].role == "both"
        assert read_roles(tmp_path) == frozenset()

    asyncio.run(body())
