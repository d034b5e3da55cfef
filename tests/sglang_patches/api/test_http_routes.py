"""EEP's routes in front of a stand-in for an instance: what they translate, and what they refuse."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.observe.event_feed import EventFeed
from eep.observe.event_log import EventLog
from eep.operations.held_experts import HeldExperts
from eep.operations.operation_request import MOST_BYTES
from eep.operations.operation_runner import OperationRunner
from sglang_patches.api.event_stream import MOST_STREAMS, EventStreams
from sglang_patches.api.mounting import is_keyless
from sglang_patches.front_end import server_end
from sglang_patches.front_end.routes import OWN, RouteList
from tests.operations.instance import Instance

STATUS = {
    "phase": "RUN",
    "ranks": {
        "0": {"status": "ready", "in": True, "incarnation": 2, "still_for": 0.0},
        "1": {"status": "starting", "in": False, "incarnation": 1, "still_for": None},
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


class Served:
    """Routes under test, asked as ASGI servers ask them. All of one test in one event loop."""

    def __init__(self, directory: Path, has_key: bool = False) -> None:
        routes: Any = importlib.import_module("sglang_patches.api.http_routes")
        fastapi: Any = importlib.import_module("fastapi")
        self.instance, self.status = Instance(), Status()
        self.api = routes.ServedApi(
            directory,
            SimpleNamespace(auto_create_handle_loop=lambda: None),
            self.status,
            OperationRunner(self.instance, looks_every=0.001),
            EventStreams(EventFeed("life"), lambda: False),
            has_key=has_key,
        )
        self.app = fastapi.FastAPI()
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


@pytest.fixture
def served(sglang: None, tmp_path: Path) -> Served:
    tmp_path.chmod(0o700)
    return Served(tmp_path)


def run(body: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 30))


def test_an_operation_is_carried_out_once_and_told(served: Served) -> None:
    async def body() -> None:
        code, told = await served.apply(id="a", action="launch", rank=4, path="/eep/apply?wait=10")
        assert (code, told["state"], told["orders"]) == (200, "done", ["launch 4"])
        assert (await served.apply(id="a", action="launch", rank=4))[1]["state"] == "done"
        assert len(served.instance.given) == 1
        assert (await served.ask("GET", "/eep/operations/a"))[1]["state"] == "done"
        assert [each["id"] for each in (await served.ask("GET", "/eep/operations"))[1]] == ["a"]
        assert (await served.ask("GET", "/eep/operations/b"))[0] == 404

    run(body)


def test_what_is_no_operation_is_refused_and_changes_nothing(served: Served) -> None:
    async def body() -> None:
        await served.apply(id="a", action="drain")
        assert (await served.apply(id="a", action="undrain"))[0] == 409
        assert (await served.apply(id="b", action="remove"))[0] == 400
        assert (await served.ask("POST", "/eep/apply", content=b"x" * (MOST_BYTES + 1)))[0] == 400
        code, told = await served.apply(id="c", action="scale", ranks=99)
        assert (code, told["state"]) == (200, "failed"), "a refusal is in the first answer"
        assert len(served.instance.given) == 1

    run(body)


def test_others_may_not_change_anything_without_a_key(served: Served, tmp_path: Path) -> None:
    async def body() -> None:
        code, told = await served.apply("10.0.0.7", id="a", action="remove", rank=1)
        assert code == 403
        assert "--admin-api-key" in told["error"]["message"]
        assert served.instance.given == []
        keyed = Served(tmp_path, has_key=True)
        assert (await keyed.apply("10.0.0.7", id="a", action="remove", rank=1))[0] == 200

    run(body)


def test_too_many_operations_are_told_to_come_again(served: Served) -> None:
    served.instance.silent = 10**9

    async def body() -> None:
        asked = [served.apply(id=f"o{number}", action="undrain") for number in range(17)]
        codes = sorted(code for code, _ in await asyncio.gather(*asked))
        assert codes == [202] * 16 + [429]

    run(body)


def test_a_rank_is_alive_if_it_is_in(served: Served) -> None:
    async def body() -> None:
        assert (await served.ask("GET", "/eep/ranks/0/live"))[0] == 200
        code, told = await served.ask("GET", "/eep/ranks/1/live")
        assert (code, told["error"]["message"]) == (503, "rank 1 is starting")
        assert (await served.ask("GET", "/eep/ranks/7/live"))[0] == 404
        served.status.silent = True
        assert (await served.ask("GET", "/eep/ranks/0/live"))[0] == 503
        assert (await served.ask("GET", "/eep/status"))[0] == 503

    run(body)


def test_readiness_is_what_the_front_end_says(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server_end, "why_not_ready", lambda _, ranks, unknown: None if ranks < 3 else f"2 of {ranks} ranks are in"
    )

    async def body() -> None:
        assert (await served.ask("GET", "/eep/ready?ranks=2"))[0] == 200
        code, told = await served.ask("GET", "/eep/ready?ranks=3")
        assert (code, told["error"]["message"]) == (503, "2 of 3 ranks are in")
        assert (await served.ask("GET", "/eep/ready?ranks=0"))[0] == 422

    run(body)


def test_events_are_listed_after_an_id_and_streams_are_bounded(served: Served, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host")
    log.write("RUN", 1, "first")
    log.write("REVOKED", 1, "second")

    async def body() -> None:
        while len((await served.ask("GET", "/eep/events?follow=false"))[1]) < 2:
            await asyncio.sleep(0.01)
        _, (second,) = await served.ask("GET", "/eep/events?follow=false&after=life.1")
        assert (second["id"], second["cause"]) == ("life.2", "second")
        _, found = await served.ask("GET", "/eep/events?follow=false", headers={"Last-Event-ID": "life.2"})
        assert found == []
        served.api.streams.open = MOST_STREAMS
        assert (await served.ask("GET", "/eep/events"))[0] == 429

    run(body)
    log.close()


def test_the_schema_shows_every_route_and_the_guard_lets_them_through(served: Served) -> None:
    shown = served.app.openapi()["paths"]
    assert shown.keys() == OWN
    assert "deadline_s" in json.dumps(shown["/eep/apply"]["post"])
    assert all(RouteList({}).is_allowed(path) for path in ("/eep/status", "/eep/operations/x", "/eep/ranks/3/live"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/eep/apply"),
        ("GET", "/eep/status"),
        ("GET", "/eep/experts"),
        ("GET", "/eep/events"),
        ("GET", "/eep/operations"),
        ("GET", "/eep/operations/x"),
    ],
)
def test_sglang_asks_for_its_admin_key(served: Served, method: str, path: str) -> None:
    auth: Any = importlib.import_module("sglang.srt.utils.auth")
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    level = auth._get_auth_level_from_app_and_scope(served.app, scope)
    assert level is auth.AuthLevel.ADMIN_OPTIONAL


@pytest.mark.parametrize(
    ("method", "path", "keyless"),
    [
        ("GET", "/eep/", True),
        ("GET", "/eep/ready", True),
        ("GET", "/eep/ranks/12/live", True),
        ("POST", "/eep/apply", False),
        ("POST", "/eep/", False),
        ("GET", "/eep/status", False),
        ("GET", "/eep/events", False),
        ("GET", "/eep/ranks/1/live/../../status", False),
    ],
)
def test_only_probes_and_the_page_need_no_key(method: str, path: str, keyless: bool) -> None:
    assert is_keyless(method, path) is keyless
