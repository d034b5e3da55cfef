"""Starts ranks from processes that were prepared in advance: spares.

What a rank does before it can join takes seconds, on a GPU tens of them. So processes are kept that have done what is the
same for every rank, and wait (:mod:`eep.control.launch.spare_process`). A rank takes one: it is told which rank it is and
goes on from there. If none is ready it takes the one that is furthest, and if there is none at all a process that gets its
order at once, which is what starting a command would be. When another is prepared is for
:class:`eep.control.launch.refill.Refill` to say, and where it comes from for :class:`eep.control.launch.spare.SpareSource`.

A spare carries the supervisor's directory in its environment, as ranks do, so the keeper ends it too; it ends by itself
when the supervisor's thread, or what forked it, does. One that dies is replaced, which disturbs no rank. One that was taken
has its order, also if it became ready in that very moment; if it ends without following it, it is a rank that failed.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import INCARNATION, RANK, Child, NoteWriter
from eep.control.launch.refill import Refill
from eep.control.launch.spare import ForkedSpares, Spare, SpareSource
from eep.control.launch.spare_order import MAX_ORDER, SPARE_FOR
from eep.membership import Effect, Notify, Phase

KEPT_FOR = 60.0
"""How long, in seconds, a spare that is bound to a rank is kept when the rank is in no view."""


class SpareLauncher:
    """``entry`` is the ``module:function`` that a rank runs, with ``arguments``, which must be JSON.

    ``source`` is where processes come from. A spare calls ``warm``, a ``module:function`` without arguments, such as one
    that opens a GPU. A context on the wrong GPU is of no use, so the variable ``EEP_SPARE_FOR`` names a rank to ``warm``:
    the one that was relaunched last, since it may die again, or else the first that was started. A spare may still
    become any rank; that only costs the time to open another device.

    If it ``binds``, a spare is for the rank that was named to it and for no other: it may be that rank already, up to its
    first step. Then each rank has one, as far as there are to be so many, and a second if there are to be more.

    ``refill`` says how many spares there should be and when to prepare them. Without spares every start is cold.
    """

    def __init__(
        self,
        entry: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        refill: Refill,
        source: SpareSource,
        warm: str = "",
        binds: bool = False,
    ) -> None:
        self._entry, self._arguments = entry, dict(arguments or {})
        json.dumps(self._arguments)  # refuse here what could not be sent later
        self._warm, self._source, self._binds = warm, source, binds
        self._refill = refill
        self._environment: dict[str, str] = {}
        self._seen: set[int] = set()
        self._running: tuple[int, ...] = ()
        self._last: int | None = None
        """The rank that was relaunched last, or else the first that was started."""
        self._pool: list[Spare] = []
        self._tasks: dict[asyncio.Task[None], int | None] = {}
        """Each of which starts a spare, and for which rank."""
        self._ending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._tell: NoteWriter | None = None

    # What a supervisor uses.

    async def start(self, rank: int, incarnation: int, environment: Mapping[str, str]) -> Child:
        if self._closed:
            raise OSError("this launcher is closed")
        self._environment = {k: v for k, v in environment.items() if k not in (RANK, INCARNATION)}
        if rank in self._seen or self._last is None:
            self._last = rank
        self._seen.add(rank)
        order = self._order(environment)
        self._refill.launched(self._now(), rank, incarnation)
        child = self._take(order, rank, incarnation)
        if child is None:
            child = await self._start_cold(order)
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        await self._source.close()

    def follow(self, watch: Callable[[Callable[[Effect], None]], None], tell: NoteWriter) -> None:
        """Hear from a supervisor when ranks run, and tell it what is going on here."""
        self._tell = tell
        watch(self._happened)

    @property
    def forks(self) -> ForkLauncher | None:
        """What forks the spares; None if they are started otherwise."""
        return self._source.forks if isinstance(self._source, ForkedSpares) else None

    def status(self) -> dict[str, object]:
        ready = [spare.child.pid for spare in self._pool if spare.is_ready]
        return {
            "kind": "whole" if self._binds else "warm",
            "wanted": self._refill.wanted,
            "ready": len(ready),
            "preparing": len(self._pool) - len(ready) + len(self._tasks),
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
        fit = [spare for spare in self._pool if not self._binds or spare.rank == rank]
        for spare in sorted(fit, key=lambda each: not each.is_ready):
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

    async def _start_cold(self, order: bytes) -> Child:
        """A process that has its order before it has prepared anything."""
        spare = await self._new("", self._last)
        try:
            if self._closed:
                raise OSError("this launcher is closed")
            return spare.take(order)
        except OSError:
            spare.kill()
            await spare.gone()
            raise

    async def _new(self, warm: str, rank: int | None) -> Spare:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**self._environment, SPARE_FOR: str(rank)}
        try:
            with theirs:
                child = await self._source.start(warm, environment, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return Spare(child, ours, rank, self._became_ready, self._ended)

    async def _prepare(self, rank: int | None) -> None:
        try:
            spare = await self._new(self._warm, rank)
        except OSError as error:
            self._failed(f"cannot be started: {error}", 0.0)
        else:
            self._pool.append(spare)

    def _prepared(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task)
        self._look()

    def _next_rank(self) -> int | None:
        """For which rank to prepare another; None for none. One that is bound starts from what its rank has, so only when
        the rank runs."""
        if not self._binds:
            return self._last
        has = Counter([*(spare.rank for spare in self._pool), *self._tasks.values()])
        most = math.ceil(
            self._refill.wanted / max(1, len(self._seen))
        )  # so that those of a rank that is out are kept for it
        lacking = [rank for rank in self._running if has[rank] < most]
        return min(lacking, key=lambda rank: (has[rank], rank != self._last), default=None)

    def _look(self) -> None:
        """Prepare as many as it is time for, and come back when it is time for more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed or self._last is None:
            return
        rank = self._next_rank()
        if rank is None:
            return
        ready = sum(spare.is_ready for spare in self._pool)
        wait = self._refill.wait(self._now(), ready, len(self._pool) - ready + len(self._tasks))
        if wait is None:
            return
        if wait > 0:
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)
            return
        task = asyncio.get_running_loop().create_task(self._prepare(rank))
        self._tasks[task] = rank
        task.add_done_callback(self._prepared)
        self._look()

    def _happened(self, effect: Effect) -> None:
        if isinstance(effect, Notify) and effect.phase is Phase.RUN:
            self._refill.runs({rank: effect.view.incarnations[rank] for rank in effect.view.active})
            self._running = tuple(rank for rank in effect.view.active if rank in self._seen)
            self._look()
            if self._binds:
                asyncio.get_running_loop().call_later(KEPT_FOR, self._let_go)

    def _let_go(self) -> None:
        """Of spares whose rank does not come back: they hold its memory."""
        for spare in [each for each in self._pool if each.rank not in self._running and not self._closed]:
            self._pool.remove(spare)
            spare.kill()
            self._say("SPARE", f"process {spare.child.pid} ends: its rank has not come back", spare.rank or 0)
            task = asyncio.get_running_loop().create_task(spare.gone())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _became_ready(self, spare: Spare) -> None:
        self._say(
            "SPARE", f"process {spare.child.pid} is ready, {self._now() - spare.since:.1f} s after it was started"
        )
        self._look()

    def _ended(self, spare: Spare, evidence: str) -> None:
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
