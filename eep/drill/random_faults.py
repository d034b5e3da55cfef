"""Faults at random moments against a running server: ranks killed one, two and three at a time, stopped for a while, killed
once more while they join, and spares killed.

The seed decides what comes when. Which process that hits depends on the moment: there may be no spare, or one rank left.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from eep.drill.faults import Rank, Target

KILLS = {"kill-1": 1, "kill-2": 2, "kill-3": 3}
STOP, JOINER, SPARE = "stop", "joiner", "spare"
_LOOKS_EVERY = 0.05
_JOINS_WITHIN = 60.0


@dataclass(frozen=True)
class FaultMix:
    """How often faults come, and of which kinds."""

    gap: tuple[float, float] = (0.3, 8.0)
    """The shortest and the longest pause between two faults, in seconds."""
    weights: Mapping[str, float] = field(
        default_factory=lambda: {"kill-1": 5.0, "kill-2": 2.0, "kill-3": 1.0, STOP: 1.0, JOINER: 1.5, SPARE: 1.0}
    )
    stopped: tuple[float, float] = (3.0, 20.0)
    """How long a rank that is stopped stands still, in seconds."""
    joining: tuple[float, float] = (0.1, 6.5)
    """How long after its relaunch a joiner is killed, in seconds."""

    def __post_init__(self) -> None:
        if unknown := set(self.weights) - {*KILLS, STOP, JOINER, SPARE}:
            raise ValueError(
                f"there are no faults called {sorted(unknown)}: choose from {[*KILLS, STOP, JOINER, SPARE]}"
            )
        for name in ("gap", "stopped", "joining"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must be two numbers of seconds, the smaller first, got {low} and {high}")


SINGLE_KILLS = FaultMix(gap=(1.0, 3.0), weights={"kill-1": 1.0})
"""One rank at a time and nothing else."""


@dataclass(frozen=True, slots=True)
class DoneFault:
    """A fault that was done."""

    at: float
    kind: str
    ranks: tuple[tuple[int, int], ...]
    """The ranks that it hit, each with its life; none for a spare."""
    seconds: float = 0.0
    """How long a stopped rank was to stand still, or a joiner was left to join."""


def stops_of(faults: Iterable[DoneFault]) -> list[tuple[float, float]]:
    """From when to when a rank was stopped. It gets a second more, to catch up."""
    return [(fault.at, fault.at + fault.seconds + 1.0) for fault in faults if fault.kind == STOP]


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault that is to come."""

    pause: float
    """Seconds since the one before."""
    kind: str
    seconds: float
    dice: int
    """Decides which of the ranks that there are."""


def plan_faults(fault_mix: FaultMix, seed: int) -> Iterator[PlannedFault]:
    """What comes when, without end."""
    choose = random.Random(seed)
    kinds, weights = list(fault_mix.weights), list(fault_mix.weights.values())
    while True:
        pause, kind = choose.uniform(*fault_mix.gap), choose.choices(kinds, weights)[0]
        lasts = {STOP: fault_mix.stopped, JOINER: fault_mix.joining}.get(kind)
        yield PlannedFault(pause, kind, choose.uniform(*lasts) if lasts else 0.0, choose.getrandbits(32))


class RandomFaults:
    """Does what is planned, and writes down what it did."""

    def __init__(self, target: Target, fault_mix: FaultMix, seed: int, say: Callable[[str], None] = print) -> None:
        self.done: list[DoneFault] = []
        self._target, self._say = target, say
        self._planned = plan_faults(fault_mix, seed)
        self._later: list[threading.Thread] = []
        self._over = threading.Event()

    def run(self, seconds: float) -> None:
        """For so long. Ranks that stand still then are woken."""
        end = time.monotonic() + seconds
        try:
            for planned in self._planned:
                if self._over.wait(min(planned.pause, max(0.0, end - time.monotonic()))) or time.monotonic() >= end:
                    return
                self._do(planned, end)
        finally:
            self._over.set()
            for thread in self._later:
                thread.join(_JOINS_WITHIN)

    def _do(self, planned: PlannedFault, end: float) -> None:
        choose = random.Random(planned.dice)
        inside = [rank for rank in self._target.ranks().values() if rank.is_in and rank.pid is not None]
        if planned.kind in KILLS:
            victims = choose.sample(inside, min(KILLS[planned.kind], len(inside)))
            self._do_to(planned.kind, victims, signal.SIGKILL)
        elif planned.kind == SPARE:
            self._kill_spare(choose)
        elif inside:
            victim = choose.choice(inside)
            if planned.kind == STOP:
                seconds = min(planned.seconds, max(1.0, end - time.monotonic()))
                self._do_to(STOP, [victim], signal.SIGSTOP, seconds)
                self._in_a_while(lambda: self._wake(victim, seconds))
            else:
                self._do_to("kill-1", [victim], signal.SIGKILL)
                self._in_a_while(lambda: self._kill_joiner(victim, planned.seconds))

    def _do_to(self, kind: str, victims: list[Rank], number: signal.Signals, seconds: float = 0.0) -> None:
        at = time.monotonic()
        hit = [rank for rank in victims if rank.pid is not None and _send(rank.pid, number)]
        if hit:
            self._note(DoneFault(at, kind, tuple((rank.rank, rank.incarnation) for rank in hit), seconds))

    def _kill_spare(self, choose: random.Random) -> None:
        spares = self._target.spares()
        if spares and _send(choose.choice(spares), signal.SIGKILL):
            self._note(DoneFault(time.monotonic(), SPARE, ()))

    def _wake(self, rank: Rank, seconds: float) -> None:
        self._over.wait(seconds)
        # The supervisor may have fenced it meanwhile, and another process may have its number.
        with suppress(OSError):
            if rank.pid is not None and self._has_pid(rank):
                os.kill(rank.pid, signal.SIGCONT)

    def _has_pid(self, rank: Rank) -> bool:
        now = self._target.ranks().get(rank.rank)
        return now is not None and now.pid == rank.pid

    def _kill_joiner(self, lost: Rank, seconds: float) -> None:
        """The next life of a rank, ``seconds`` after it was launched."""
        end = time.monotonic() + _JOINS_WITHIN
        while (
            (now := self._target.ranks().get(lost.rank)) is None or now.incarnation <= lost.incarnation or not now.pid
        ):
            if time.monotonic() > end or self._over.wait(_LOOKS_EVERY):
                return
        if not self._over.wait(seconds) and self._has_pid(now):
            self._do_to(JOINER, [now], signal.SIGKILL, seconds)

    def _in_a_while(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._later.append(thread)
        thread.start()

    def _note(self, fault: DoneFault) -> None:
        self.done.append(fault)
        hit = ", ".join(f"rank {rank} (life {life})" for rank, life in fault.ranks)
        self._say(f"{fault.kind}: {hit or 'a spare'}" + (f", {fault.seconds:.1f} s" if fault.seconds else ""))


def _send(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
