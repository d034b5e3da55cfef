"""Faults on purpose, against a running server: kill, stop and wake its ranks, slow one down, lose what one sends, or all of
it at random; at any moment, or at a named point.

The caller must be able to enter the supervisor's private directory and read its key. The supervisor names the processes, and
the signals are real ones. Orders for named points lie in that directory until a rank obeys them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eep.faults import LOSABLE, FaultPlan, orders
from eep.observe.event_log import EventLine, read_events

_LOOKS_EVERY = 0.05


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank as its supervisor knows it now."""

    rank: int
    incarnation: int
    pid: int | None
    is_in: bool


class Target:
    """The ranks of the server whose supervisor has that directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fired_before: dict[tuple[int | None, str], int] = {}
        """How often a point had acted when it was last armed."""

    def ranks(self) -> dict[int, Rank]:
        return {
            int(number): Rank(int(number), rank["incarnation"], rank["pid"], rank["in"])
            for number, rank in self._status()["ranks"].items()
        }

    def spares(self) -> list[int]:
        """The processes that are ready to become ranks."""
        return [int(pid) for pid in (self._status().get("spares") or {}).get("pids", [])]

    def fork_servers(self) -> list[int | None]:
        """The process that ranks are forked from, and its copy; empty where ranks are not forked."""
        return list(self._status().get("fork_servers") or [])

    def wait_for_spares(self, count: int, within: float = 120.0) -> list[int]:
        """Until there are so many of them, or for so long; those that there are then."""
        end = time.monotonic() + within
        while len(found := self.spares()) < count and time.monotonic() < end:
            time.sleep(_LOOKS_EVERY)
        return found

    def kill(self, rank: int) -> None:
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """The rank stands still, as in a debugger or on a machine that swaps: not dead, and not answering."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def slow(self, rank: int, seconds: float, share: float = 0.5) -> None:
        """The rank runs only that share of the time, in slices of 20 ms, for so many seconds."""
        if not 0 < share < 1:
            raise ValueError(f"a slow rank runs between 0 and 1 of the time, got {share}")
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self.stop(rank)
                time.sleep(0.02 * (1 - share))
                self.resume(rank)
                time.sleep(0.02 * share)
        finally:
            with suppress(ValueError):
                self.resume(rank)

    def arm(
        self, rank: int | None, point: str, action: str, *, skip: int = 0, sleep_ms: float = 0, count: int = 1
    ) -> None:
        """Does ``action`` at the ``skip + 1``-th passing of ``point`` by that rank, or by the supervisor (None).

        Whichever life of the rank passes it first does: one that is started later, too.
        """
        self.need_permission()
        known = self.ranks()
        if rank is not None:
            _check_rank(rank, known)
        self._fired_before[rank, point] = self._times_fired(rank, point)
        orders.give(self.directory, rank, point, FaultPlan(action, skip, sleep_ms, count))

    def drop(self, rank: int, count: int = 1) -> None:
        """The next ``count`` messages of tokens that it sends are lost: the rank has sent them, and no peer hears of them."""
        self.arm(rank, LOSABLE[0], "drop", count=count)

    def disarm(self) -> int:
        """Takes back what has not acted yet; how much that was."""
        self.need_permission()
        return orders.withdraw(self.directory)

    def armed(self) -> list[tuple[str, str]]:
        """What has not acted yet: whom it is for, and at which point."""
        return sorted(orders.pending(self.directory))

    def fired(self) -> list[EventLine]:
        """Every time that a point has acted in this server."""
        return [line for line in read_events(self.directory / "events.jsonl") if line.phase == orders.FIRED]

    def wait_until_fired(self, rank: int | None, point: str, within: float) -> bool:
        """Until what was armed there by this target has acted. False if that does not come."""
        end, before = time.monotonic() + within, self._fired_before.get((rank, point), 0)
        while self._times_fired(rank, point) <= before:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOKS_EVERY)
        return True

    def drill(self, seconds: float, every: float, seed: int, *, most: int = 3) -> Iterator[tuple[float, int]]:
        """Kills at random moments, up to ``most`` ranks at once; yields each kill as it is done (time, rank)."""
        yield from random_kills(self.try_kill, list(self.ranks()), seconds, every, seed, most)

    def try_kill(self, rank: int) -> bool:
        """Whether there was a process to kill."""
        try:
            self.kill(rank)
        except ValueError:
            return False
        return True

    def _status(self) -> dict[str, Any]:
        from eep.control.wire.client import ask_supervisor
        from eep.control.wire.messages import AskStatus

        status: dict[str, Any] = json.loads(ask_supervisor(self.directory, AskStatus()).body)
        return status

    def _times_fired(self, rank: int | None, point: str) -> int:
        return sum(line.rank == rank and line.operation == point for line in self.fired())

    def _signal(self, rank: int, number: signal.Signals) -> None:
        known = self.ranks()
        _check_rank(rank, known)
        pid = known[rank].pid
        if pid is None:
            raise ValueError(f"rank {rank} has no process now: it has died and is not started again yet")
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise ValueError(f"the process of rank {rank} has just ended") from None

    def need_permission(self) -> None:
        """ValueError if the server was not told that it may be drilled."""
        if not orders.allowed_in(self.directory):
            raise ValueError(f"the server of {self.directory} was not started with --eep-faults on; it is left alone")


def _check_rank(rank: int, known: Mapping[int, Rank]) -> None:
    if rank not in known:
        raise ValueError(f"this server has ranks {sorted(known)}, not {rank}")


def random_kills(
    kill: Callable[[int], bool], ranks: list[int], seconds: float, every: float, seed: int, most: int
) -> Iterator[tuple[float, int]]:
    """The schedule of a drill is decided by its seed alone; what it hits depends on the moment."""
    choose = random.Random(seed)
    end = time.monotonic() + seconds
    while True:
        time.sleep(min(choose.uniform(0.2, 1.8) * every, max(0.0, end - time.monotonic())))
        if time.monotonic() >= end:
            return
        for rank in choose.sample(ranks, choose.randint(1, max(1, min(most, len(ranks))))):
            if kill(rank):
                yield time.monotonic(), rank
