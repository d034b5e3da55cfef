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

SOON = 0.2


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eep.control.wire.listener.AGAIN_AFTER", SOON)


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


def test_a_connection_that_cannot_be_taken_is_taken_later_and_the_loop_does_other_things_meanwhile() -> None:
    async def body() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        took: list[socket.socket] = []
        failed: list[OSError] = []
        accepts = ConnectionListener(listener, took.append, failed.append)
        with socket.socket() as client:
            with without_descriptors():
                client.connect(listener.getsockname())
                await asyncio.sleep(3.5 * SOON)
                assert len(failed) in range(1, 5), "asked again and again"
                assert not took
            await until(lambda: took)
            took[0].close()
        accepts.close()

    asyncio.run(body())


def test_closed_while_it_waits_it_does_not_come_back() -> None:
    async def body() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        failed: list[OSError] = []
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        accepts = ConnectionListener(listener, lambda connection: connection.close(), failed.append)
        with socket.socket() as client:
            with without_descriptors():
                client.connect(listener.getsockname())
                await until(lambda: failed)
            accepts.close()
            await asyncio.sleep(2 * SOON)
        assert not faults

    asyncio.run(body())


def test_a_supervisor_says_so(tmp_path: Path) -> None:
    class DeskOwner:
        def __init__(self) -> None:
            self.rejected: list[str] = []

        def reject(self, kind: str, reason: str) -> None:
            self.rejected.append(kind)

    async def body() -> None:
        desk = DeskOwner()
        front = FrontDesk(tmp_path / "socket", new_key(), desk, lambda descriptor: None)  # type: ignore[arg-type]
        front.listen()
        with socket.socket(socket.AF_UNIX) as client:
            with without_descriptors():
                client.connect(str(tmp_path / "socket"))
                await until(lambda: desk.rejected)
            await until(lambda: front._connections)
        assert set(desk.rejected) == {"not-accepted"}
        front.close()

    asyncio.run(body())
