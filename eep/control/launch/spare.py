"""One spare: a process that is being prepared or waits, from its start until a rank takes it or it ends."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import Child, StartedProcess, describe_exit, kill_all_of, readable
from eep.control.launch.spare_order import MAX_ORDER
from eep.control.launch.spare_process import ENTRY

READY_WITHIN = 600.0
ENDS_WITHIN = 10.0


class SpareSource(Protocol):
    """Where the processes come from."""

    async def start(self, warm: str, environment: Mapping[str, str], descriptor: int) -> Child:
        """A process that runs :mod:`eep.control.launch.spare_process` with its own copy of the descriptor. OSError if it
        cannot be had."""

    async def close(self) -> None: ...


class StartedSpares:
    """New interpreters, each of which imports ``preload`` for itself."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = list(preload)

    async def start(self, warm: str, environment: Mapping[str, str], descriptor: int) -> Child:
        process = subprocess.Popen(
            [sys.executable, "-m", "eep.control.launch.spare_process", str(descriptor), warm, *self._preload],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        return StartedProcess(process, os.pidfd_open(process.pid))

    async def close(self) -> None:
        pass


class ForkedSpares:
    """Forks of a process that has imported everything."""

    def __init__(self, forks: ForkLauncher) -> None:
        self.forks = forks

    async def start(self, warm: str, environment: Mapping[str, str], descriptor: int) -> Child:
        return await self.forks.fork(ENTRY, {"warm": warm, "modules": []}, environment, descriptor)

    async def close(self) -> None:
        await self.forks.close()


class Spare:
    """``rank`` is the one that was named to it. ``ready`` and ``ended`` are called from the event loop; ``ended`` with how it
    ended, and not if a rank took it."""

    def __init__(
        self,
        child: Child,
        ours: socket.socket,
        rank: int | None,
        ready: Callable[[Spare], None],
        ended: Callable[[Spare, str], None],
    ) -> None:
        ours.setblocking(False)
        self.child, self.rank = child, rank
        self.is_ready = False
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._socket, self._ready, self._ended = ours, ready, ended
        self._end: asyncio.Task[None] | None = None
        self._deadline = self._loop.call_later(READY_WITHIN, kill_all_of, self.child)
        self._loop.add_reader(ours, self._heard)
        self._loop.add_reader(self.child.pidfd, self._has_ended)

    def take(self, order: bytes) -> Child:
        """Send it its order. From now on the caller watches it. OSError if it does not listen."""
        self._socket.send(order)
        # A socket that closes with something unread (here: that the spare is ready) resets the other end, which then
        # reads an error instead of its order. So stop receiving, and read what has arrived; the socket's buffer bounds it.
        with suppress(OSError):  # it has ended since: that is told by its exit
            self._socket.shutdown(socket.SHUT_RD)
            while self._socket.recv(MAX_ORDER):
                pass
        self._let_go()
        return self.child

    def kill(self) -> None:
        """End it, and do not tell that it has ended."""
        self._let_go()
        kill_all_of(self.child)

    async def gone(self) -> None:
        """Wait for one that was killed. One that does not end even so is left to the keeper."""
        try:
            await asyncio.wait_for(readable(self.child.pidfd), ENDS_WITHIN)
            await self.child.exit_code()
        except TimeoutError:
            pass
        os.close(self.child.pidfd)

    def _heard(self) -> None:
        """It is ready, or it has closed its end: then it is about to end, and is helped to."""
        self._loop.remove_reader(self._socket)
        self._deadline.cancel()
        try:
            self.is_ready = bool(self._socket.recv(MAX_ORDER))
        except OSError:
            pass
        if self.is_ready:
            self._ready(self)
        else:
            kill_all_of(self.child)

    def _has_ended(self) -> None:
        self._let_go()
        kill_all_of(self.child)  # what it started goes with it
        os.close(self.child.pidfd)
        self._end = self._loop.create_task(self._tell_end())

    async def _tell_end(self) -> None:
        self._ended(self, describe_exit(await self.child.exit_code()))

    def _let_go(self) -> None:
        self._deadline.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self.child.pidfd)
        self._socket.close()
