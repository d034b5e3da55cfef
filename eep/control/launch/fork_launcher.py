"""Starts ranks by forking a process that has imported everything they need (:mod:`eep.control.launch.fork_server`).

Importing a serving engine takes tens of seconds; forking takes milliseconds. The fork server is started with the
first rank and again, at once, whenever it ends; ranks that it forked before live on. A caller that has imported
everything already can fork the first one itself (:func:`eep.control.launch.fork_server.fork_here`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from eep.control.launch import fork_server
from eep.control.launch.processes import INCARNATION, RANK, Child

READY_WITHIN = 600.0
ANSWERS_WITHIN = 60.0
ATTEMPTS = 3


class ForkServerGone(OSError):
    """The fork server has ended, or does not answer."""


class _Process(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self) -> object: ...


@dataclass(frozen=True)
class _ForkedRank:
    server: _ForkServerLink
    pid: int
    pidfd: int

    async def exit_code(self) -> int | None:
        try:
            answer, _ = await self.server.ask({"reap": self.pid}, ANSWERS_WITHIN)
        except ForkServerGone:
            return None
        code = answer["code"]
        return None if code is None else int(code)


class ForkLauncher:
    """``entry`` is the ``module:function`` that a rank runs, with ``arguments``, which must be JSON. ``first`` is the
    first fork server; those after it import ``preload``."""

    def __init__(
        self,
        entry: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        preload: Sequence[str] = (),
        first: fork_server.ForkServerProcess | None = None,
    ) -> None:
        json.dumps(dict(arguments or {}))  # refuse here what could not be sent later
        self._first = first
        self._entry, self._arguments, self._preload = entry, dict(arguments or {}), list(preload)
        self._environment: dict[str, str] = {}
        self._server: _ForkServerLink | None = None
        self._starting = asyncio.Lock()
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def server_pid(self) -> int | None:
        return self._server.pid if self._server is not None and self._server.open else None

    async def start(self, rank: int, incarnation: int, environment: Mapping[str, str]) -> Child:
        self._environment = {k: v for k, v in environment.items() if k not in (RANK, INCARNATION)}
        request = {"fork": self._entry, "arguments": self._arguments}
        for attempt in range(ATTEMPTS):
            try:
                server = await self._running()
                variables = {**server.set_since(), **environment}
                answer, descriptors = await server.ask({**request, "environment": variables}, ANSWERS_WITHIN)
            except ForkServerGone:
                if self._closed or attempt == ATTEMPTS - 1:
                    raise
                continue
            if "error" in answer:
                raise OSError(answer["error"])
            return _ForkedRank(server, int(answer["pid"]), descriptors[0])
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        self._closed = True
        for task in list(self._restarts):
            task.cancel()
        if self._first is not None:
            self._first.socket.close()
            self._first.kill()
            self._first.wait()
        if self._server is not None:
            self._server.end()

    async def _running(self) -> _ForkServerLink:
        """The fork server, when it is ready."""
        async with self._starting:
            if self._closed:
                raise ForkServerGone("this launcher is closed")
            if self._server is None or not self._server.open:
                if self._first is not None:
                    server, self._first = _ForkServerLink(self._first, self._first.socket, self._ended), None
                else:
                    server = _ForkServerLink(*_start(self._preload, self._environment), self._ended)
                self._server = server
                answer, _ = await server.answer(READY_WITHIN)
                for failure in answer["ready"]:
                    print(f"eep: the fork server could not import {failure}", file=sys.stderr)
            return self._server

    def _ended(self) -> None:
        """Start the next fork server before it is needed. If that fails, the next start tries again and says why."""

        async def restart() -> None:
            with suppress(ForkServerGone):
                await self._running()

        if not self._closed and not self._restarts:
            task = asyncio.get_running_loop().create_task(restart())
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)


def _start(preload: Sequence[str], environment: Mapping[str, str]) -> tuple[_Process, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "eep.control.launch.fork_server", str(theirs.fileno()), *preload]
    with theirs:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


class _ForkServerLink:
    """One fork server process. Answers come in the order of the questions."""

    def __init__(self, process: _Process, ours: socket.socket, ended: Any) -> None:
        ours.setblocking(False)
        self._process, self._socket, self._ended, self.open = process, ours, ended, True
        self._awaited: deque[asyncio.Future[tuple[dict[str, Any], list[int]]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._read)
        self._ready = self._expect()

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_since(self) -> dict[str, str]:
        """The variables of this process that a server which was forked from it does not know of."""
        if not isinstance(self._process, fork_server.ForkServerProcess):
            return {}
        known = self._process.environment
        return {name: value for name, value in os.environ.items() if known.get(name) != value}

    async def answer(self, within: float) -> tuple[dict[str, Any], list[int]]:
        """Its first word: that it is ready."""
        return await self._wait(self._ready, within)

    async def ask(self, question: dict[str, Any], within: float) -> tuple[dict[str, Any], list[int]]:
        self._send(question)
        return await self._wait(self._expect(), within)

    def end(self) -> None:
        """End it; its children live on."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for awaited in self._awaited:
            if not awaited.done():
                awaited.set_exception(ForkServerGone("the fork server has ended"))

    def _expect(self) -> asyncio.Future[tuple[dict[str, Any], list[int]]]:
        future: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._awaited.append(future)
        return future

    async def _wait(
        self, future: asyncio.Future[tuple[dict[str, Any], list[int]]], within: float
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            return await asyncio.wait_for(future, within)
        except TimeoutError:
            self._gone()
            raise ForkServerGone(f"the fork server did not answer within {within:g} s") from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                answer, descriptors = future.result()
                if descriptors:
                    self._unwanted(answer, descriptors[0])
            raise

    def _send(self, message: dict[str, Any]) -> None:
        if not self.open:
            raise ForkServerGone("the fork server has ended")
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError as error:
            self._gone()
            raise ForkServerGone(f"the fork server does not listen: {error}") from error

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, fork_server.MAX_MESSAGE, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data or not self._awaited:
            self._gone()
            return
        awaited, answer = self._awaited.popleft(), json.loads(data)
        if not awaited.done():
            awaited.set_result((answer, list(descriptors)))
        elif descriptors:
            self._unwanted(answer, descriptors[0])

    def _unwanted(self, answer: dict[str, Any], pidfd: int) -> None:
        """The caller that wanted this child has gone: end the child."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        with suppress(ForkServerGone):
            self._send({"reap": answer["pid"]})
            self._expect().cancel()

    def _gone(self) -> None:
        if self.open:
            self.end()
            self._ended()
