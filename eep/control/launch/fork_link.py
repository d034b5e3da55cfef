"""One fork server (:mod:`eep.control.launch.fork_server`), seen from the process that asks it for ranks."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from eep.control.launch import fork_server

ENDS_WITHIN = 10.0


class ForkServerGone(OSError):
    """The fork server has ended, or does not answer."""


class ServerProcess(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self) -> object: ...


@dataclass(frozen=True)
class CopiedServer:
    """A fork server that another has forked from itself. ``environment`` is the one that the first of them was born with,
    if that was forked from this process."""

    pid: int
    pidfd: int
    environment: Mapping[str, str] | None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self) -> None:
        """Once. It is no child of this process, so this does not reap it."""
        select.select([self.pidfd], [], [], ENDS_WITHIN)
        os.close(self.pidfd)


def start_fork_server(preload: Sequence[str], environment: Mapping[str, str]) -> tuple[ServerProcess, socket.socket]:
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


class ForkServerLink:
    """One fork server process. Answers come in the order of the questions. ``ended`` is called with this link when the
    process has ended by itself."""

    def __init__(self, process: ServerProcess, ours: socket.socket, ended: Callable[[ForkServerLink], None]) -> None:
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
        known = self._known_environment
        return {} if known is None else {name: value for name, value in os.environ.items() if known.get(name) != value}

    @property
    def _known_environment(self) -> Mapping[str, str] | None:
        process = self._process
        return process.environment if isinstance(process, fork_server.ForkServerProcess | CopiedServer) else None

    async def answer(self, within: float) -> tuple[dict[str, Any], list[int]]:
        """Its first word: that it is ready."""
        return await self._wait(self._ready, within)

    async def ask(
        self, question: dict[str, Any], within: float, given: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Its answer, and the descriptors that came with it; ``given`` are those that go with the question."""
        self._send(question, given)
        return await self._wait(self._expect(), within)

    async def copy(self, within: float) -> tuple[CopiedServer, socket.socket]:
        """A copy of it, and our end of a socket to the copy. OSError if it cannot be made."""
        answer, descriptors = await self.ask({"copy": True}, within)
        if "error" in answer:
            raise OSError(answer["error"])
        pidfd, ours = descriptors
        return CopiedServer(int(answer["pid"]), pidfd, self._known_environment), socket.socket(fileno=ours)

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
                    self._unwanted(answer, descriptors)
            raise

    def _send(self, message: dict[str, Any], given: Sequence[int] = ()) -> None:
        if not self.open:
            raise ForkServerGone("the fork server has ended")
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], given)
        except OSError as error:
            self._gone()
            raise ForkServerGone(f"the fork server does not listen: {error}") from error

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, fork_server.MAX_MESSAGE, 2)
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
            self._unwanted(answer, list(descriptors))

    def _unwanted(self, answer: dict[str, Any], descriptors: Sequence[int]) -> None:
        """The caller that wanted this child has gone: end the child."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ForkServerGone):
            self._send({"reap": answer["pid"]})
            self._expect().cancel()

    def _gone(self) -> None:
        if self.open:
            self.end()
            self._ended(self)
