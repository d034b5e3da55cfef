"""The phases of a run: calm, storms in which ranks are killed, and storms in which only spares are."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from bench.failover.kills import kill_now
from bench.takeover.step_notes import StepNotes
from eep.drill.story import Story

EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.0)
"""Of the slices of time after a kill, in seconds."""
CALM, STORM, SPARES = "calm", "storm", "spares"


@dataclass(frozen=True)
class Phase:
    kind: str
    moments: tuple[float, ...]
    """When something was killed."""
    began: float
    ended: float
    stayed: tuple[tuple[int, ...], ...] = ()
    """At each of these moments: the processes of the ranks that were not killed. In a calm, once, those of all ranks."""
    steps: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """When steps of these processes began."""

    def told(self, token_times: Sequence[float]) -> dict[str, object]:
        """To be asked when the load has ended: an answer counts when it is whole."""
        seconds = self.ended - self.began
        return {
            "kind": self.kind,
            "kills": len(self.moments),
            "seconds": round(seconds, 2),
            "tokens_per_second": round(_between(token_times, self.began, self.ended) / seconds, 1),
            "after_kills": [round(rate, 1) for rate in after(token_times, self.moments)],
            "steps_per_second": round(self._steps_per_second(), 2),
            "steps_after_kills": [round(rate, 2) for rate in self._steps_after()],
        }

    def _steps_per_second(self) -> float:
        """Of a rank, in a calm."""
        counts = [_between(self.steps.get(pid, ()), self.began, self.ended) for pids in self.stayed for pid in pids]
        return statistics.fmean(counts) / (self.ended - self.began) if counts and not self.moments else 0.0

    def _steps_after(self) -> list[float]:
        """As :func:`after`, the mean of the ranks that stayed. Of kills that are too long ago nothing was kept."""
        found = []
        for moment, pids in zip(self.moments, self.stayed, strict=False):
            for times in (self.steps.get(pid, ()) for pid in pids):
                if times and times[0] < moment:
                    found.append(after(times, [moment]))
        return [statistics.fmean(rates) for rates in zip(*found, strict=True)]


def after(token_times: Sequence[float], moments: Sequence[float]) -> list[float]:
    """Tokens per second in each slice after a kill, the mean of all kills; nothing if there were none."""
    if not moments:
        return []
    return [
        sum(_between(token_times, each + since, each + until) for each in moments) / (until - since) / len(moments)
        for since, until in pairwise(EDGES)
    ]


def _between(token_times: Sequence[float], since: float, until: float) -> int:
    return bisect_left(token_times, until) - bisect_left(token_times, since)


def calm(seconds: float, story: Story, notes: StepNotes) -> Phase:
    began, pids = time.monotonic(), _pids(story)
    time.sleep(seconds)
    return Phase(CALM, (), began, time.monotonic(), (pids,), notes.read())


def _pids(story: Story, but: int | None = None) -> tuple[int, ...]:
    found = story.target.ranks().items()
    return tuple(rank.pid for number, rank in found if rank.pid is not None and number != but)


def storm(
    story: Story, notes: StepNotes, kills: int, every: float, choose: random.Random, end: float, within: float
) -> Phase:
    """Ranks in an order of chance, but none twice before each of the others was killed. No kill comes after ``end``."""
    ranks, order = len(story.target.ranks()), list[int]()
    while len(order) < kills:
        order += choose.sample(range(ranks), ranks)

    stayed: list[tuple[int, ...]] = []

    def kill(rank: int) -> None:
        story.wait_until_all_run(ranks, within)
        stayed.append(_pids(story, but=rank))
        kill_now(story, rank)

    phase = _keep_killing(STORM, kill, order[:kills], every, end)
    return replace(phase, stayed=tuple(stayed), steps=notes.read())


def storm_of_spares(story: Story, kills: int, every: float, choose: random.Random, end: float) -> Phase:
    """What it costs to prepare spares: no rank is lost. Where none is ready, none is killed."""

    def kill(_number: int) -> None:
        if pids := story.target.spares():
            with suppress(ProcessLookupError):
                os.kill(choose.choice(pids), signal.SIGKILL)

    return _keep_killing(SPARES, kill, range(kills), every, end)


def _keep_killing(kind: str, kill: Callable[[int], None], what: Iterable[int], every: float, end: float) -> Phase:
    began, moments = time.monotonic(), list[float]()
    for number, each in enumerate(what):
        time.sleep(max(0.0, began + number * every - time.monotonic()))
        if moments and time.monotonic() > end:
            break
        kill(each)
        moments.append(time.monotonic())
    time.sleep(max(0.0, began + len(moments) * every - time.monotonic()))
    return Phase(kind, tuple(moments), began, time.monotonic())
