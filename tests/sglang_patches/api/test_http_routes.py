"""EEP's routes in front of a stand-in for an instance: what they translate, and what they refuse."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.console.server_files import TOKEN_HEADER, read_files
from eep.hardware.evidence import Evidence, UnknownHardware
from eep.observe.event_feed import EventFeed
from eep.observe.event_log import EventLog, notice_line
from eep.operations.held_experts import HeldExperts
from eep.operations.operation_request import MOST_BYTES
from eep.operations.operation_runner import OperationRunner, OrderRefused
from eep.operations.operation_table import TooManyOperations
from sglang_patches.api import mounting
from sglang_patches.api.event_stream import MOST_STREAMS, EventStreams
from sglang_patches.api.mounting import is_keyless
from sglang_patches.front_end import server_end
from sglang_patches.front_end.routes import OWN, RouteList
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


def test_the_token_that_the_server_leaves_in_its_directory_lets_its_user_in(served: Served, tmp_path: Path) -> None:
    parts: Any = importlib.import_module("sglang_patches.api.served_api")
    served.api.token = parts._say_where(tmp_path, SimpleNamespace(host="10.0.0.7", port=30000, ssl_certfile=None))
    files = read_files(tmp_path)
    assert files is not None
    assert files.url == "http://10.0.0.7:30000"

    async def body() -> None:
        for token, code in ((files.token, 200), ("0" * 64, 403)):
            asked = {"id": f"a-{code}", "action": "undrain"}
            told = await served.ask("POST", "/eep/apply?wait=10", "10.0.0.7", json=asked, headers={TOKEN_HEADER: token})
            assert told[0] == code

    run(body)


def test_evidence_is_heard_and_what_is_none_is_refused(served: Served, tmp_path: Path) -> None:
    async def tell(client: str = "127.0.0.1", **fields: Any) -> tuple[int, Any]:
        return await served.ask("POST", "/eep/evidence", client, content=json.dumps(fields))

    async def body() -> None:
        assert (await tell("10.0.0.7", id="e", reason="xid.79", rank=1))[0] == 403
        assert (await tell(id="e", reason="xid.79"))[0] == 400
        assert (await tell(id="e", reason="xid.79", rank=7))[0] == 404
        assert (await served.ask("POST", "/eep/evidence", content=b"x" * (MOST_BYTES + 1)))[0] == 400
        assert served.desk.heard == []
        code, told = await tell(id="e", reason="xid.79", rank=1)
        assert (code, told["reaction"]) == (200, "fence")
        for error, code in ((OrderRefused("no"), 409), (TooManyOperations("many"), 429), (OSError("gone"), 503)):
            served.desk.fails = error
            assert (await tell(id="e", reason="xid.79", rank=1))[0] == code
        assert len(served.desk.heard) == 1

    run(body)


def test_too_many_operations_are_told_to_come_again(served: Served) -> None:
    served.instance.silent = 10**9

    async def body() -> None:
        asked = [served.apply(id=f"o{number}", action="undrain") for number in range(17)]
        codes = sorted(code for code, _ in await asyncio.gather(*asked))
        assert codes == [202] * 16 + [429]

    run(body)


def test_an_operation_is_cancelled_and_taken_back(served: Served) -> None:
    served.instance.slow = (3,)

    async def body() -> None:
        code, told = await served.apply(id="a", action="scale", ranks=3)
        assert (code, told["state"]) == (202, "running")
        assert (await served.apply(id="b", action="scale", ranks=5))[0] == 202
        code, told = await served.ask("POST", "/eep/operations/b/cancel")
        assert (code, told["state"], told["reason"]) == (200, "failed", "it was cancelled")
        code, told = await served.ask("POST", "/eep/operations/a/cancel")
        assert (code, told["state"]) == (202, "running"), "it is still taken back"
        served.instance.settle(3)
        while (await served.ask("GET", "/eep/operations/a"))[0] == 202:
            await asyncio.sleep(0.01)
        assert (await served.ask("GET", "/eep/operations/a"))[1]["undone"] == ["launch 3"]
        assert (await served.ask("POST", "/eep/operations/a/cancel"))[0] == 200, "it has ended"
        assert (await served.ask("POST", "/eep/operations/none/cancel"))[0] == 404
        assert (await served.ask("POST", "/eep/operations/a/cancel", "10.0.0.7"))[0] == 403

    run(body)


def test_refusals_say_whether_and_when_to_ask_again(served: Served) -> None:
    served.instance.silent = 10**9

    async def refused(method: str, path: str, **named: Any) -> tuple[int, bool, str | None]:
        async with served._client("127.0.0.1") as session:
            answer = await session.request(method, path, **named)
        return answer.status_code, answer.json()["error"]["retry"], answer.headers.get("retry-after")

    async def body() -> None:
        await asyncio.gather(*(served.apply(id=f"o{number}", action="kill", rank=1) for number in range(16)))
        another = json.dumps({"id": "o1", "action": "kill", "rank": 2})
        assert await refused("POST", "/eep/apply", content=another) == (409, False, None)
        more = json.dumps({"id": "more", "action": "kill", "rank": 2})
        assert await refused("POST", "/eep/apply", content=more) == (429, True, "1")
        assert await refused("POST", "/eep/apply?wait=nan", content=more) == (400, False, None)
        assert await refused("GET", "/eep/events?follow=maybe") == (400, False, None)
        assert await refused("GET", f"/eep/events?after={'x' * 65}") == (400, False, None)
        served.status.silent = True
        assert await refused("GET", "/eep/status") == (503, True, "1")

    run(body)


def test_a_server_that_ends_begins_nothing_and_keeps_nobody_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.instance.silent = 10**9

    async def body() -> None:
        waits = asyncio.ensure_future(served.apply(id="a", action="drain", path="/eep/apply?wait=60"))
        while served.api.runner.table.get("a") is None:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(server_end, "why_ending", lambda: "it was told to (SIGTERM)")
        assert (await waits)[0] == 202
        code, told = await served.apply(id="b", action="undrain")
        assert (code, told["error"]["message"]) == (503, "the server ends: it was told to (SIGTERM)")
        assert served.api.runner.table.get("b") is None

    run(body)


def test_many_who_ask_for_the_same_at_once_get_one_operation(served: Served) -> None:
    async def body() -> None:
        asked = [served.apply(id="a", action="kill", rank=1, deadline_s=10 + number) for number in range(32)]
        answers = await asyncio.gather(*asked)
        assert {code for code, _ in answers} <= {200, 202}, "accepted, or over already"
        assert len({told["accepted_at"] for _, told in answers}) == 1
        assert len(served.instance.given) == 1

    run(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"id": "a", "action": "drain", "deadline_s": NaN}',
        b'{"id": "a", "action": "drain", "deadline_s": 1e999}',
        b'{"id": "..", "action": "drain"}',
        b'{"id": "a", "action": "explode"}',
        b'{"id": "a", "action": "scale", "ranks": 123456789012345678901234567890}',
        b'{"id": "a", "action": "kill", "rank": "1"}',
        b"[" * 10_000,
    ],
)
def test_nonsense_is_refused_with_a_text_and_begins_nothing(served: Served, body: bytes) -> None:
    async def ask() -> None:
        code, told = await served.ask("POST", "/eep/apply", content=body)
        assert code == 400
        assert told["error"]["message"].startswith("this is no operation")
        assert served.api.runner.table.newest(9) == []

    run(ask)


@pytest.mark.parametrize("ident", ["%00", "%ff", "a%20b", "x" * 5000, "%F0%9F%92%A5"])
def test_an_operation_with_a_strange_id_is_not_known(served: Served, ident: str) -> None:
    async def body() -> None:
        code, _ = await served.ask("GET", f"/eep/operations/{ident}")
        assert code == 404

    run(body)


def test_the_user_of_the_directory_needs_no_other_key(sglang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    auth: Any = importlib.import_module("sglang.srt.utils.auth")
    monkeypatch.setattr(mounting, "_tokens", {"own"})

    def allowed(path: str, header: str | None) -> bool:
        named = {"api_key": None, "admin_api_key": "secret", "auth_level": auth.AuthLevel.ADMIN_OPTIONAL}
        decision = mounting._decide(
            auth.decide_request_auth, method="POST", path=path, authorization_header=header, **named
        )
        return bool(decision.allowed)

    assert allowed("/eep/apply", "Bearer own")
    assert allowed("/eep/apply", "Bearer secret")
    assert not allowed("/eep/apply", None)
    assert not allowed("/flush_cache", "Bearer own")


def test_a_rank_that_starts_is_alive_and_not_ready(served: Served) -> None:
    async def body() -> None:
        code, told = await served.ask("GET", "/eep/ranks/0/live")
        assert (code, told["state"], told["incarnation"]) == (200, "in", 2)
        assert (await served.ask("GET", "/eep/ranks/0/ready"))[0] == 200
        code, told = await served.ask("GET", "/eep/ranks/1/live")
        assert (code, told["state"]) == (200, "starting")
        code, told = await served.ask("GET", "/eep/ranks/1/ready")
        assert (code, told["error"]["message"]) == (503, "rank 1 is starting")

    run(body)


def test_a_rank_that_stands_still_or_is_gone_is_not_alive(served: Served) -> None:
    async def body() -> None:
        code, told = await served.ask("GET", "/eep/ranks/2/live?still_s=20")
        assert (code, told["error"]["message"]) == (503, "rank 2 is in, and has stood still for 25 s")
        assert (await served.ask("GET", "/eep/ranks/2/live"))[0] == 200
        code, told = await served.ask("GET", "/eep/ranks/3/live")
        assert (code, told["error"]["message"]) == (503, "rank 3 is down: it has no process")
        assert (await served.ask("GET", "/eep/ranks/2/live?still_s=0"))[0] == 400
        assert (await served.ask("GET", "/eep/ranks/7/live"))[0] == 404
        assert (await served.ask("GET", "/eep/ranks/7/ready"))[0] == 404
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
        for wrong in ("0", "-1", "1.5", "nan", "1e999", "x", "", "9" * 500):
            assert (await served.ask("GET", f"/eep/ready?ranks={wrong}"))[0] == 400, wrong

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


def test_lines_that_cannot_be_read_are_listed_and_sent_as_such(served: Served, tmp_path: Path) -> None:
    strange = ["no json", "5", json.dumps({"time": float("nan")}), json.dumps(asdict(notice_line("RUN", "\ud800")))]
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in strange))

    async def body() -> None:
        while len((await served.ask("GET", "/eep/events?follow=false"))[1]) < 4:
            await asyncio.sleep(0.01)
        _, found = await served.ask("GET", "/eep/events?follow=false")
        assert [line["phase"] for line in found] == ["UNREADABLE"] * 3 + ["RUN"]

    run(body)


def test_the_schema_shows_every_route_and_the_guard_lets_them_through(served: Served) -> None:
    shown = served.app.openapi()["paths"]
    assert shown.keys() == OWN
    apply = shown["/eep/apply"]["post"]
    assert "deadline_s" in json.dumps(apply["requestBody"])
    assert apply["responses"].keys() == {"200", "202", "400", "403", "409", "429", "503"}
    assert "undone" in json.dumps(apply["responses"]["200"])
    assert "retry" in json.dumps(apply["responses"]["429"])
    assert [each["name"] for each in apply["parameters"]] == ["wait"]
    assert "adminKey" in served.app.openapi()["components"]["securitySchemes"]


def test_the_schema_shows_how_each_route_answers_and_whether_it_wants_a_key(served: Served) -> None:
    auth: Any = importlib.import_module("sglang.srt.utils.auth")
    shown = served.app.openapi()["paths"]
    for route in served.app.routes:
        if getattr(route, "path", "") in OWN:
            (method,) = route.methods
            told = shown[route.path][method.lower()]
            assert "422" not in told["responses"], route.path
            is_admin = getattr(route.endpoint, "_auth_level", None) is auth.AuthLevel.ADMIN_OPTIONAL
            assert (told.get("security") == [{"adminKey": []}]) is is_admin, route.path


def test_the_guard_knows_every_route() -> None:
    assert all(RouteList({}).is_allowed(path) for path in ("/eep/status", "/eep/operations/x", "/eep/ranks/3/live"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/eep/apply"),
        ("POST", "/eep/evidence"),
        ("POST", "/eep/operations/x/cancel"),
        ("GET", "/eep/status"),
        ("GET", "/eep/experts"),
        ("GET", "/eep/events"),
        ("GET", "/eep/operations"),
        ("GET", "/eep/operations/x"),
        ("POST", "/v1/fault_tolerance/apply"),
        ("GET", "/fault_tolerance/status"),
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
        ("GET", "/eep/ranks/12/ready", True),
        ("GET", "/eep/ranks/12/stop", False),
        ("POST", "/eep/apply", False),
        ("POST", "/eep/", False),
        ("GET", "/eep/status", False),
        ("GET", "/eep/events", False),
        ("GET", "/v1/fault_tolerance/status", False),
        ("GET", "/eep/ranks/1/live/../../status", False),
    ],
)
def test_only_probes_and_the_page_need_no_key(method: str, path: str, keyless: bool) -> None:
    assert is_keyless(method, path) is keyless
