"""Faults on purpose, against a running server: kill, stop and wake its ranks, slow one down, or all of it at random.

Whoever does this must be able to enter the supervisor's private directory and read its key; it answers nobody else. It names
the processes, and the signals are real ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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

    def ranks(self) -> dict[int, Rank]:
        from eep.control.client import ask
        from eep.control.messages import AskStatus

        status = json.loads(ask(self.directory, AskStatus()).body)
        return {
            int(number): Rank(int(number), rank["incarnation"], rank["pid"], rank["in"])
            for number, rank in status["ranks"].items()
        }

    def kill(self, rank: int) -> None:
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """It stands still, as in a debugger or a machine that swaps: not dead, and not answering."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def slow(self, rank: int, seconds: float, share: float = 0.5) -> None:
        """It runs only that share of the time, in slices of 20 ms, for so long."""
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

    def _signal(self, rank: int, number: signal.Signals) -> None:
        known = self.ranks()
        if rank not in known:
            raise ValueError(f"this server has ranks {sorted(known)}, not {rank}")
        pid = known[rank].pid
        if pid is None:
            raise ValueError(f"rank {rank} has no process now: it has died and is not started again yet")
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise ValueError(f"the process of rank {rank} has just ended") from None


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
