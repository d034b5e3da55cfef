"""Starts ranks by forking a process that has imported everything they need (:mod:`eep.control.launch.fork_server`).

Importing a serving engine takes tens of seconds; forking takes milliseconds. The fork server is started with the
first rank. It keeps a copy of itself, which takes its place when it ends; only if both end at once does the next one import
everything again. Ranks that were forked before live on. A caller that has imported everything already can fork the first one
itself (:func:`eep.control.launch.fork_server.fork_here`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eep.control.launch.fork_link import ForkServerGone, ForkServerLink, start_fork_server
from eep.control.launch.fork_server import ForkServerProcess
from eep.control.launch.processes import INCARNATION, RANK, Child, NoteWriter

READY_WITHIN = 600.0
ANSWERS_WITHIN = 60.0
ATTEMPTS = 3
COPIES_EVERY = 1.0
"""How long to wait after a copy has ended: one that always ends at once is not to take all the time there is."""


@dataclass(frozen=True)
class _ForkedProcess:
    server: ForkServerLink
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
        first: ForkServerProcess | None = None,
    ) -> None:
        json.dumps(dict(arguments or {}))  # refuse here what could not be sent later
        self._first = first
        self._entry, self._arguments, self._preload = entry, dict(arguments or {}), list(preload)
        self._environment: dict[str, str] = {}
        self._server: ForkServerLink | None = None
        self._starting = asyncio.Lock()
        self._copy: ForkServerLink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False
        self._tell: NoteWriter | None = None

    @property
    def server_pid(self) -> int | None:
        return self._server.pid if self._server is not None and self._server.open else None

    @property
    def copy_pid(self) -> int | None:
        """The fork server that takes its place when it ends."""
        return self._copy.pid if self._copy is not None and self._copy.open else None

    async def start(self, rank: int, incarnation: int, environment: Mapping[str, str]) -> Child:
        return await self.fork(self._entry, self._arguments, environment)

    async def fork(
        self,
        entry: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        descriptor: int | None = None,
    ) -> Child:
        """A process that runs ``entry``, with a copy of the descriptor if one is given. OSError if it cannot be had."""
        self._environment = {k: v for k, v in environment.items() if k not in (RANK, INCARNATION)}
        request = {"fork": entry, "arguments": dict(arguments)}
        given = [] if descriptor is None else [descriptor]
        for attempt in range(ATTEMPTS):
            try:
                server = await self._running()
                variables = {**server.set_since(), **environment}
                answer, descriptors = await server.ask({**request, "environment": variables}, ANSWERS_WITHIN, given)
            except ForkServerGone:
                if self._closed or attempt == ATTEMPTS - 1:
                    raise
                continue
            if "error" in answer:
                raise OSError(answer["error"])
            return _ForkedProcess(server, int(answer["pid"]), descriptors[0])
        raise AssertionError("the last attempt returns or raises")

    def tell(self, note: NoteWriter) -> None:
        """Tell a supervisor what is going on here."""
        self._tell = note

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._first is not None:
            self._first.socket.close()
            self._first.kill()
            self._first.wait()
        for server in (self._copy, self._server):
            if server is not None:
                server.end()

    async def _running(self) -> ForkServerLink:
        """The fork server, when it is ready."""
        async with self._starting:
            if self._closed:
                raise ForkServerGone("this launcher is closed")
            if self._server is None or not self._server.open:
                self._server = server = self._next()
                answer, _ = await server.answer(READY_WITHIN)
                for failure in answer["ready"]:
                    print(f"eep: the fork server could not import {failure}", file=sys.stderr)
                self._do(self._keep_copy_of(server))
            return self._server

    def _next(self) -> ForkServerLink:
        copy, self._copy = self._copy, None
        if copy is not None and copy.open:
            return copy
        if self._first is not None:
            first, self._first = self._first, None
            return ForkServerLink(first, first.socket, self._ended)
        return ForkServerLink(*start_fork_server(self._preload, self._environment), self._ended)

    async def _keep_copy_of(self, server: ForkServerLink, instead_of: int | None = None) -> None:
        """Without a copy the next fork server would have to import everything again. ``instead_of``: a copy that ended."""
        try:
            if instead_of is not None:
                await server.ask({"reap": instead_of}, ANSWERS_WITHIN)
                await asyncio.sleep(COPIES_EVERY)
            process, ours = await server.copy(ANSWERS_WITHIN)
        except ForkServerGone:
            return
        except OSError as error:
            self._say(f"the fork server has no copy: {error}")
            return
        self._copy = ForkServerLink(process, ours, self._ended)

    def _ended(self, server: ForkServerLink) -> None:
        """Have the next fork server before it is needed. If that fails, the next start tries again and says why."""
        if self._closed:
            return
        if server is self._copy:
            self._copy = None
            if self._server is not None and self._server.open:
                self._do(self._keep_copy_of(self._server, instead_of=server.pid))
            return
        ended = f"the fork server (process {server.pid}) has ended"
        if self._copy is not None and self._copy.open:
            self._say(f"{ended}, and its copy (process {self._copy.pid}) takes its place")
        else:
            self._say(f"{ended}; ranks that are lost wait until the next has imported what they need")
        if self._replacing is None or self._replacing.done():  # else the one that was to replace another has ended
            self._replacing = self._do(self._replace())

    async def _replace(self) -> None:
        began = asyncio.get_running_loop().time()
        try:
            server = await self._running()
        except ForkServerGone as error:
            self._say(f"the next fork server ended before it was ready: {error}")
        else:
            took = asyncio.get_running_loop().time() - began
            self._say(f"process {server.pid} is ready after {took:.1f} s, and ranks are forked from it")

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _say(self, cause: str) -> None:
        if self._tell is not None:
            self._tell("FORK-SERVER", cause)
