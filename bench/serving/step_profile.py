"""Where the time of a step on a GPU goes, read off the trace that torch's profiler writes of one rank. Pure."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OURS = "eep::"
OFTEN = 24
"""Of how many kernels it is told how often they are started: nearly all of a step's."""


@dataclass(frozen=True)
class Profile:
    """Microseconds per step, over the steps of a trace."""

    steps: int
    wall: float
    busy: float
    """In which at least one kernel of this rank ran."""
    exchange: float
    """Of that, in dispatch and combine, their waits for the other ranks included."""
    kernels: float
    """How many kernels a step starts."""
    largest: tuple[tuple[str, float], ...]
    """The kernels that took longest, by name."""
    often: tuple[tuple[str, float], ...]
    """Those that are started most often, by name, and how many times: each costs its host time, where no graph is."""

    @property
    def idle(self) -> float:
        """In which the device had nothing of this rank to do: its host had not come that far."""
        return self.wall - self.busy


def read(path: Path) -> list[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def profile(events: Iterable[Mapping[str, Any]], steps: int, largest: int = 8) -> Profile:
    """Of a trace of so many steps. ValueError if no kernel is in it."""
    kernels = sorted(
        (float(event["ts"]), float(event["dur"]), _short(str(event["name"])))
        for event in events
        if event.get("cat") == "kernel"
    )
    if not kernels:
        raise ValueError("no kernel is in this trace")
    times: dict[str, float] = defaultdict(float)
    starts: Counter[str] = Counter()
    for _, duration, name in kernels:
        times[name] += duration
        starts[name] += 1
    begin, end = kernels[0][0], max(start + duration for start, duration, _ in kernels)
    return Profile(
        steps=steps,
        wall=(end - begin) / steps,
        busy=_covered(kernels) / steps,
        exchange=_covered([kernel for kernel in kernels if kernel[2].startswith(_OURS)]) / steps,
        kernels=len(kernels) / steps,
        largest=tuple(
            (name, times[name] / steps) for name in sorted(times, key=times.__getitem__, reverse=True)[:largest]
        ),
        often=tuple((name, count / steps) for name, count in starts.most_common(OFTEN)),
    )


def _covered(kernels: Iterable[tuple[float, float, str]]) -> float:
    """The time in which at least one of them ran; they are in the order in which they began."""
    covered, reached = 0.0, float("-inf")
    for start, duration, _ in kernels:
        covered += max(0.0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    return covered


def _short(name: str) -> str:
    """A kernel's name without its arguments and what its templates were given."""
    plain = name.replace("void ", "").replace("(anonymous namespace)::", "")
    return plain.partition("(")[0].partition("<")[0][:60]
