"""Connections that come while this process has no descriptors left. It really has none: its limit is lowered."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from eep.control.supervisor.front_desk import FrontDesk
from eep.control.wire.listener import ConnectionListener
from eep.control.wire.sealed_frames import new_key
from tests.control.harness import PATIENCE

SOON, NEVER = 0.05, 3600.0
TURNS = 100
"""Turns of the loop. One that tried again in each of them would fail as often."""


def try_again_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eep.control.wire.listener.AGAIN_AFTER", seconds)


def listening() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


@contextmanager
def without_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    filling: list[int] = []
    try:
        with suppress(OSError):
            while True:
                filling.append(os.dup(0))
        yield
    finally:
        for each in filling:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_connection_that_cannot_be_taken_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_after(SOON, monkeypatch)

    async def body() -> None:
        sock = listening()
        took: list[socket.socket] = []
        failed: list[OSError] = []
        listener = ConnectionListener(sock, took.append, failed.append)
        with socket.socket() as client:
            with without_descriptors():
                client.connect(sock.getsockname())
                await until(lambda: len(failed) > 1)
                assert not took
            await until(lambda: took)
            took[0].close()
        listener.close()

    asyncio.run(body())


def test_the_loop_does_other_things_while_a_connection_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_after(NEVER, monkeypatch)

    async def body() -> None:
        sock = listening()
        failed: list[OSError] = []
        listener = ConnectionListener(sock, lambda connection: connection.close(), failed.append)
        with socket.socket() as client, without_descriptors():
            client.connect(sock.getsockname())
            await until(lambda: failed)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert len(failed) == 1, "asked again in every turn of the loop"
        listener.close()

    asyncio.run(body())


def test_closed_while_it_waits_it_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_after(NEVER, monkeypatch)

    async def body() -> None:
        sock = listening()
        failed: list[OSError] = []
        listener = ConnectionListener(sock, lambda connection: connection.close(), failed.append)
        with socket.socket() as client, without_descriptors():
            client.connect(sock.getsockname())
            await until(lambda: failed)
            again = listener._again
            assert again is not None, "it does not wait"
            assert not again.cancelled()
            listener.close()
            assert again.cancelled()

    asyncio.run(body())


def test_a_supervisor_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_after(SOON, monkeypatch)

    class Owner:
        def __init__(self) -> None:
            self.rejected: list[str] = []

        def reject(self, kind: str, reason: str) -> None:
            self.rejected.append(kind)

    async def body() -> None:
        owner = Owner()
        front = FrontDesk(tmp_path / "socket", new_key(), owner, lambda descriptor: None)  # type: ignore[arg-type]
        front.listen()
        with socket.socket(socket.AF_UNIX) as client:
            with without_descriptors():
                client.connect(str(tmp_path / "socket"))
                await until(lambda: owner.rejected)
            await until(lambda: front._connections)
        assert set(owner.rejected) == {"not-accepted"}
        await front.close()

    asyncio.run(body())
