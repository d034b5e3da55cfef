"""How much of the machine other programs took while a bench measured: those on it, and the host of a virtual machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class MachineTime:
    """Seconds: the clock, what all cores have worked or were kept from working by the host, and the bench's part of that."""

    at: float
    taken: float
    ours: float


def read_machine(pids: Iterable[int], proc: Path = Path("/proc")) -> MachineTime:
    """``pids``: the processes of the bench. One that is gone by now is left out."""
    user, nice, system, _, _, irq, softirq, stolen = map(int, (proc / "stat").read_text().split()[1:9])
    ours = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            # The name of a program, in brackets, may have spaces.
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])
    return MachineTime(time.monotonic(), (user + nice + system + irq + softirq + stolen) / _TICKS, ours / _TICKS)


def others_share(before: MachineTime, after: MachineTime, cores: int) -> float:
    """Of the time of all cores, what went to other programs."""
    others = (after.taken - before.taken) - (after.ours - before.ours)
    return max(0.0, others) / (cores * (after.at - before.at))
