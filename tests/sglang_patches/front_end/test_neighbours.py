"""Requests go on to the front end of another host while this one has no ranks. Real HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.front_end.neighbours import MARK, NeighbourGate, announce, find_others, own_url

aiohttp = pytest.importorskip("aiohttp")
uvicorn = pytest.importorskip("uvicorn")


class Registry:
    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def publish(self, key: str, value: bytes) -> None:
        self.records[key] = value

    def withdraw(self, key: str) -> None:
        del self.records[key]

    def close(self) -> None:
        pass

    def scan(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.records.items() if key.startswith(prefix)}


class Served:
    """An application that answers with its name and what it got, in two pieces."""

    def __init__(self, name: str, status: int = 200, hangs: bool = False) -> None:
        self.name, self.status, self.hangs = name, status, hangs
        self.got: list[dict[str, Any]] = []
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.got.append({"path": scope["path"], "query": scope["query_string"].decode(), "body": body, **headers})
        await send(
            {"type": "http.response.start", "status": self.status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": b'{"by": ', "more_body": True})
        if self.hangs:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        await send({"type": "http.response.body", "body": json.dumps(self.name).encode() + b"}"})


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    await running


async def ask(url: str, path: str = "/generate?a=b", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=b"question", headers={"authorization": "Bearer key", **headers}) as answer,
    ):
        return answer.status, await answer.json()


def test_a_request_goes_on_as_it_came_and_once() -> None:
    async def check() -> None:
        here, there = Served("here"), Served("there")
        others: list[str] = []
        is_empty = True
        async with serving(there) as far, serving(NeighbourGate(here, lambda: is_empty, lambda: others)) as near:
            others.append(far)
            assert await ask(near) == (200, {"by": "there"})
            (got,) = there.got
            assert (got["path"], got["query"], got["body"]) == ("/generate", "a=b", b"question")
            assert (got["authorization"], got[MARK.decode()]) == ("Bearer key", "1")
            assert await ask(near, **{MARK.decode(): "1"}) == (200, {"by": "here"}), "it came from another"
            assert await ask(near, "/flush_cache") == (200, {"by": "here"}), "it is for this host"
            is_empty = False
            assert await ask(near) == (200, {"by": "here"})
        assert [got["body"] for got in here.got] == [b"question"] * 3

    asyncio.run(check())


def test_a_front_end_that_is_gone_or_not_ready_is_passed_over() -> None:
    async def check() -> None:
        here, busy, ready = Served("here"), Served("busy", status=503), Served("ready")
        async with serving(busy) as first, serving(ready) as second:
            others = ["http://127.0.0.1:9", first, second]
            async with serving(NeighbourGate(here, lambda: True, lambda: others)) as near:
                assert await ask(near) == (200, {"by": "ready"})
                others.pop()
                assert await ask(near) == (200, {"by": "here"}), "it waits here when no other takes it"

    asyncio.run(check())


def test_a_client_that_leaves_ends_its_request_there() -> None:
    async def check() -> None:
        there = Served("there", hangs=True)
        async with (
            serving(there) as far,
            serving(NeighbourGate(Served("here"), lambda: True, lambda: [far])) as near,
            aiohttp.ClientSession() as session,
        ):
            answer = await session.post(near + "/generate", data=b"question")
            assert await answer.content.read(4) == b'{"by'
            answer.close()
            await asyncio.wait_for(there.left.wait(), 30)

    asyncio.run(check())


def test_front_ends_are_found_the_next_host_first() -> None:
    registry = Registry()
    for host in range(3):
        announce(registry, host, f"http://10.0.0.{host}:30000")
    registry.records["front-ends/7"] = b"no record"
    registry.records["front-ends/x"] = registry.records["front-ends/0"]
    assert find_others(registry, 1) == ["http://10.0.0.2:30000", "http://10.0.0.0:30000"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:30000"),
        ("0.0.0.0", "http://10.0.0.5:30000"),
        ("127.0.0.1", None),
        ("localhost", None),
    ],
)
def test_a_front_end_says_where_others_reach_it(host: str, url: str | None) -> None:
    args = SimpleNamespace(host=host, port=30000, ssl_keyfile=None, ssl_certfile=None)
    assert own_url(args, "10.0.0.5") == url
    assert own_url(SimpleNamespace(**{**vars(args), "ssl_certfile": "c"}), "10.0.0.5") is None
