"""Where the time of a step on a GPU goes, from the trace that torch's profiler writes of one rank. Pure functions."""

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
"""For how many kernels the profile says how often they start: nearly all of a step's."""


@dataclass(frozen=True)
class Profile:
    """Microseconds per step, over the steps of a trace."""

    steps: int
    wall: float
    busy: float
    """While at least one kernel of this rank ran."""
    exchange: float
    """Of that, in dispatch and combine, including their waits for the other ranks."""
    kernels: float
    """How many kernels a step starts."""
    largest: tuple[tuple[str, float], ...]
    """The kernels that took longest, by name."""
    often: tuple[tuple[str, float], ...]
    """The kernels that start most often, by name, and how many times: without a graph each start costs the host time."""

    @property
    def idle(self) -> float:
        """While the device had nothing of this rank to do: the host was behind."""
        return self.wall - self.busy


def read(path: Path) -> list[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def profile(events: Iterable[Mapping[str, Any]], steps: int, largest: int = 8) -> Profile:
    """Reads a trace of so many steps. Raises ValueError if it holds no kernel."""
    kernels = sorted(
        (float(event["ts"]), float(event["dur"]), _short(str(event["name"])))
        for event in events
        if event.get("cat") == "kernel"
    )
    if not kernels:
        raise ValueError("this trace holds no kernel; profile the GPU")
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
    """How long at least one of the kernels ran; they are sorted by their beginning."""
    covered, reached = 0.0, float("-inf")
    for start, duration, _ in kernels:
        covered += max(0.0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    return covered


def _short(name: str) -> str:
    """A kernel's name without its arguments and template arguments."""
    plain = name.replace("void ", "").replace("(anonymous namespace)::", "")
    return plain.partition("(")[0].partition("<")[0][:60]
