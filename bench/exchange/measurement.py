"""Measures a case in alternating blocks of barrier-aligned rounds.

The time of a round runs from the moment the first rank leaves the barrier to the moment the last rank is
done. So work that waits for a core counts, wherever it waits. Contenders take turns in short blocks: other
work on the machine slows all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.common.fleet import Fleet
from bench.exchange.rank_process import CONTENDERS, Span
from bench.exchange.workload import Shape

DIRECTIONS = ("dispatch", "combine")

BLOCKS = 6
"""How many turns each contender takes."""

_PILOT_ROUNDS = 3
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 200  # per block


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per round, over all rounds of all blocks."""

    median_us: float
    p90_us: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Result:
    """One case: bytes moved by an average rank, and ``timings[contender][direction]``."""

    ranks: int
    tokens: int
    bytes_per_rank: dict[str, int]
    timings: dict[str, dict[str, Timing]] = field(default_factory=dict)

    def median(self, contender: str, direction: str) -> float:
        return self.timings[contender][direction].median_us

    def total(self, contender: str) -> float:
        """Median of dispatch plus median of combine."""
        return sum(self.median(contender, direction) for direction in DIRECTIONS)

    def as_json(self) -> dict[str, Any]:
        ratios = {
            other: {
                **{way: round(self.median(other, way) / self.median("eep", way), 3) for way in DIRECTIONS},
                "both": round(self.total(other) / self.total("eep"), 3),
            }
            for other in self.timings
            if other != "eep"
        }
        return {**asdict(self), "times_as_long_as_eep": ratios}


def measure(
    fleet: Fleet, ranks: int, tokens: int, shape: Shape, seconds: float, contenders: Sequence[str] = CONTENDERS
) -> Result:
    """Measures one case in about ``seconds``, shared evenly between the contenders."""
    rows = sum(fleet.ask("case", tokens)) / ranks
    samples: dict[str, dict[str, list[float]]] = {name: {way: [] for way in DIRECTIONS} for name in contenders}
    share_us = 1e6 * seconds / len(contenders) / BLOCKS
    rounds = {}
    for name in contenders:
        # A pilot warms up and shows how many rounds fit; the work between the timed parts costs about as much.
        pilot = _round_times(fleet.ask("run", name, _PILOT_ROUNDS))
        cost_us = 2 * sum(min(times) for times in pilot.values())
        rounds[name] = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(share_us / cost_us)))
    fleet.ask("verify")
    for block in range(BLOCKS):
        for turn in range(len(contenders)):
            name = contenders[(block + turn) % len(contenders)]
            times = _round_times(fleet.ask("run", name, rounds[name] + 1))
            for way in DIRECTIONS:
                samples[name][way] += times[way][1:]  # the first round of a block finds cold caches
    fleet.ask("verify")
    bytes_per_rank = {
        "dispatch": round(rows * shape.dispatch_row_bytes),
        "combine": round(rows * shape.combine_row_bytes),
    }
    timings = {name: {way: _timing(samples[name][way]) for way in DIRECTIONS} for name in contenders}
    return Result(ranks, tokens, bytes_per_rank, timings)


def _round_times(answers: list[tuple[list[Span], list[Span]]]) -> dict[str, list[float]]:
    """Per direction, the microseconds of each round: from the first rank's begin to the last rank's end."""
    return {
        way: [
            (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e3
            for spans in zip(*(answer[index] for answer in answers), strict=True)
        ]
        for index, way in enumerate(DIRECTIONS)
    }


def _timing(times_us: list[float]) -> Timing:
    p90 = statistics.quantiles(times_us, n=10, method="inclusive")[-1]
    return Timing(round(statistics.median(times_us), 2), round(p90, 2), len(times_us))
