"""Starts ranks from processes that were prepared in advance: spares.

Importing a serving engine takes tens of seconds, and where that opens a GPU the importing cannot be shared by forking
(:mod:`eep.control.launch.fork_launcher`). So processes are kept that have done it and wait
(:mod:`eep.control.launch.spare_process`). A rank takes one: it is told which rank it is and goes on from there. If none is
ready it takes the one that is furthest, and if there is none at all a process that gets its order at once, which is what
starting a command would be. When another is prepared is for :class:`eep.control.launch.refill.Refill` to say.

A spare carries the supervisor's directory in its environment, as ranks do, so the keeper ends it too; it ends by itself
when the supervisor's thread does. One that dies is replaced, which disturbs no rank. One that was taken has its order,
also if it became ready in that very moment; if it ends without following it, it is a rank that failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from eep.control.launch.processes import (
    INCARNATION,
    RANK,
    Child,
    NoteWriter,
    StartedProcess,
    describe_exit,
    kill_all_of,
    readable,
)
from eep.control.launch.refill import Refill
from eep.control.launch.spare_process import MAX_ORDER, SPARE_FOR
from eep.membership import Effect, Notify, Phase

READY_WITHIN = 600.0
ENDS_WITHIN = 10.0


class SpareLauncher:
    """``entry`` is the ``module:function`` that a rank runs, with ``arguments``, which must be JSON.

    A spare imports the modules of ``preload``, then calls ``warm``, a ``module:function`` without arguments, such as one
    that opens a GPU. A context on the wrong GPU is of no use, so the variable ``EEP_SPARE_FOR`` names a rank to ``warm``:
    the one that was relaunched last, since it may die again, or else the first that was started. A spare may still
    become any rank; that only costs the time to open another device.

    ``refill`` says how many spares there should be and when to prepare them. Without spares every start is cold.
    """

    def __init__(
        self,
        entry: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        refill: Refill,
        preload: Sequence[str] = (),
        warm: str = "",
    ) -> None:
        self._entry, self._arguments = entry, dict(arguments or {})
        json.dumps(self._arguments)  # refuse here what could not be sent later
        self._warm, self._preload = warm, list(preload)
        self._refill = refill
        self._environment: dict[str, str] = {}
        self._seen: set[int] = set()
        self._prepare_for: int | None = None
        self._pool: list[_Spare] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._tell: NoteWriter | None = None

    # What a supervisor uses.

    async def start(self, rank: int, incarnation: int, environment: Mapping[str, str]) -> Child:
        if self._closed:
            raise OSError("this launcher is closed")
        self._environment = {k: v for k, v in environment.items() if k not in (RANK, INCARNATION)}
        if rank in self._seen or self._prepare_for is None:
            self._prepare_for = rank
        self._seen.add(rank)
        order = self._order(environment)
        self._refill.launched(self._now(), rank, incarnation)
        child = self._take(order, rank, incarnation)
        if child is None:
            spare = self._new()
            try:
                child = spare.take(order)
            except OSError:
                spare.kill()
                await spare.gone()
                raise
            if self._refill.wanted:
                self._say("COLD", "no spare was ready, so a new process becomes the rank", rank, incarnation)
        self._look()
        return child

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        pool, self._pool = self._pool, []
        for spare in pool:  # all of them before the first is waited for: meanwhile another may end
            spare.kill()
        for spare in pool:
            await spare.gone()

    def follow(self, watch: Callable[[Callable[[Effect], None]], None], tell: NoteWriter) -> None:
        """Hear from a supervisor when ranks run, and tell it what is going on here."""
        self._tell = tell
        watch(self._happened)

    def status(self) -> dict[str, object]:
        ready = [spare.child.pid for spare in self._pool if spare.is_ready]
        return {
            "wanted": self._refill.wanted,
            "ready": len(ready),
            "preparing": len(self._pool) - len(ready),
            "pids": ready,
        }

    # The pool.

    def _order(self, environment: Mapping[str, str]) -> bytes:
        order = {"run": self._entry, "arguments": self._arguments, "environment": dict(environment)}
        data = json.dumps(order).encode()
        if len(data) > MAX_ORDER:
            raise OSError(
                f"the order of the rank takes {len(data)} bytes, and {MAX_ORDER} is the most; shorten its arguments"
            )
        return data

    def _take(self, order: bytes, rank: int, incarnation: int) -> Child | None:
        """The readiest spare that still listens becomes the rank."""
        for spare in sorted(self._pool, key=lambda each: not each.is_ready):
            was_ready = spare.is_ready
            try:
                child = spare.take(order)
            except OSError:
                continue  # it is dead; that is told by its exit, in a moment
            self._pool.remove(spare)
            if was_ready:
                self._refill.taken()
            state = "was ready" if was_ready else "was being prepared"
            self._say("SPARE", f"process {child.pid} becomes the rank; it {state}", rank, incarnation)
            return child
        return None

    def _new(self) -> _Spare:
        command = [self._warm, *self._preload]
        return _Spare(
            command, {**self._environment, SPARE_FOR: str(self._prepare_for)}, self._became_ready, self._ended
        )

    def _look(self) -> None:
        """Prepare as many as it is time for, and come back when it is time for more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed or self._prepare_for is None:
            return
        preparing = sum(not spare.is_ready for spare in self._pool)
        wait = self._refill.wait(self._now(), len(self._pool) - preparing, preparing)
        if wait is None:
            return
        if wait > 0:
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)
            return
        try:
            self._pool.append(self._new())
        except OSError as error:
            self._failed(f"cannot be started: {error}", 0.0)
        else:
            self._look()

    def _happened(self, effect: Effect) -> None:
        if isinstance(effect, Notify) and effect.phase is Phase.RUN:
            self._refill.runs({rank: effect.view.incarnations[rank] for rank in effect.view.active})
            self._look()

    def _became_ready(self, spare: _Spare) -> None:
        self._say(
            "SPARE", f"process {spare.child.pid} is ready, {self._now() - spare.since:.1f} s after it was started"
        )
        self._look()

    def _ended(self, spare: _Spare, evidence: str) -> None:
        self._pool.remove(spare)
        self._failed(evidence, self._now() - spare.since)

    def _failed(self, evidence: str, lived: float) -> None:
        self._refill.died(self._now(), lived)
        self._say("SPARE", "a spare ended before a rank took it", evidence=evidence)
        self._look()

    def _say(self, phase: str, cause: str, rank: int = -1, incarnation: int = -1, evidence: str = "") -> None:
        if self._tell is not None:
            self._tell(phase, cause, rank, incarnation, evidence)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _Spare:
    """One process, from its start until a rank takes it or it ends."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        ready: Callable[[_Spare], None],
        ended: Callable[[_Spare, str], None],
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "eep.control.launch.spare_process", str(theirs.fileno()), *command],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self.child = StartedProcess(process, os.pidfd_open(process.pid))
        self.is_ready = False
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._socket, self._ready, self._ended = ours, ready, ended
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
        self._ended(self, describe_exit(self.child.process.wait()))  # it has ended: this does not wait

    def _let_go(self) -> None:
        self._deadline.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self.child.pidfd)
        self._socket.close()
