"""EEP's routes in front of a stand-in for an instance, asked as ASGI servers ask them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eep.hardware.evidence import Evidence, UnknownHardware
from eep.observe.event_feed import EventFeed
from eep.operations.held_experts import HeldExperts
from eep.operations.operation_runner import OperationRunner
from sglang_patches.api.event_stream import EventStreams
from tests.operations.instance import Instance

STATUS = {
    "phase": "RUN",
    "ranks": {
        "0": {"status": "ready", "in": True, "incarnation": 2, "wanted": True, "still_for": 0.0, "pid": os.getpid()},
        "1": {
            "status": "starting",
            "in": False,
            "incarnation": 1,
            "wanted": True,
            "still_for": None,
            "pid": os.getpid(),
        },
        "2": {"status": "ready", "in": True, "incarnation": 0, "wanted": True, "still_for": 25.0, "pid": os.getpid()},
        "3": {"status": "down", "in": False, "incarnation": 0, "wanted": False, "still_for": None, "pid": None},
    },
}


class Status:
    silent = False

    async def host(self) -> dict[str, Any]:
        if self.silent:
            raise ConnectionError("nobody there")
        return dict(STATUS)

    async def whole(self) -> dict[str, Any]:
        return await self.host()

    async def experts(self) -> HeldExperts:
        return HeldExperts([[1, 2]], {0: 2})


class Desk:
    """A stand-in that knows rank 1, and remembers what it has heard."""

    def __init__(self) -> None:
        self.heard: list[Evidence] = []
        self.fails: Exception | None = None

    async def hear(self, given: Evidence) -> dict[str, Any]:
        if self.fails is not None:
            raise self.fails
        if given.rank != 1:
            raise UnknownHardware("there is no such rank")
        self.heard.append(given)
        return {"id": given.id, "reaction": "fence", "ranks": [1], "operations": []}


class Served:
    """Routes under test, asked as ASGI servers ask them. All of one test in one event loop."""

    def __init__(self, directory: Path, has_key: bool = False, app: Any = None) -> None:
        routes: Any = importlib.import_module("sglang_patches.api.http_routes")
        parts: Any = importlib.import_module("sglang_patches.api.served_api")
        fastapi: Any = importlib.import_module("fastapi")
        self.instance, self.status, self.desk = Instance(), Status(), Desk()
        self.api = parts.ServedApi(
            directory,
            SimpleNamespace(auto_create_handle_loop=lambda: None),
            self.status,
            OperationRunner(self.instance, looks_every=0.001),
            EventStreams(EventFeed("life"), lambda: False),
            self.desk,
            has_key=has_key,
            token="own",
        )
        self.app = fastapi.FastAPI() if app is None else app
        routes.mount(self.app, self.api)
        httpx: Any = importlib.import_module("httpx")
        self._client = lambda client: httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, client=(client, 5)), base_url="http://127.0.0.1:30000"
        )

    async def ask(self, method: str, path: str, client: str = "127.0.0.1", **named: Any) -> tuple[int, Any]:
        async with self._client(client) as session:
            answer = await session.request(method, path, **named)
            return answer.status_code, answer.json()

    async def apply(self, client: str = "127.0.0.1", path: str = "/eep/apply", **fields: Any) -> tuple[int, Any]:
        return await self.ask("POST", path, client, content=json.dumps(fields))


def run(body: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 30))
