"""Steady throughput of a server with something on and off, in turns, so that what drifts hits both alike."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.common.steady_clients import Clients

_BEGINS_AFTER = 0.5
"""Seconds of load before tokens are counted: the clients' first requests all begin at once."""


@dataclass(frozen=True)
class Phase:
    on: bool
    tokens_per_second: float
    ms_between_tokens: float
    """The median wait of a client for its next token. Unlike throughput it hardly depends on how the beginnings of requests
    happen to fall, which makes phases of a few seconds differ by several per cent."""
    cpu_ms_per_token: float
    """Processor time of all processes of the server. Says more than throughput where others use the processor too."""
    contexts: int = 0
    """Tokens of all prompts and answers."""
    began: float = 0.0
    ended: float = 0.0
    """From the first request to the end of the last (``time.monotonic``)."""

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.0f} tokens/s ({self.ms_between_tokens:.2f} ms apart, "
            f"{self.cpu_ms_per_token:.2f} ms of processor each)"
        )


FIGURES = {
    "tokens_per_second": ("tokens per second", 0),
    "ms_between_tokens": ("milliseconds between the tokens of a client, median of a phase", 2),
    "cpu_ms_per_token": ("milliseconds of processor per token, all processes of the server", 2),
}
"""Of each figure of a phase: what it is called, and with how many digits it is told."""


def compare(
    clients: Clients,
    throw: Callable[[bool], None],
    names: tuple[str, str],
    processes: Sequence[int],
    pairs: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[Phase]:
    """``pairs`` of phases of so many seconds, one of each kind; which comes first alternates. ``throw`` sets the switch: no
    request is under way then. ``names``: what on and off are called. ``processes`` are those of the server. RuntimeError if
    an answer is not right."""
    phases: list[Phase] = []
    clients.run(seconds)  # to warm up
    for pair in range(pairs):
        for on in (True, False) if pair % 2 == 0 else (False, True):
            throw(on)
            phases.append(_measure(clients, processes, on, names, seconds))
        last = {phase.on: phase for phase in phases[-2:]}
        say(f"pair {pair + 1:2} of {pairs}: {names[0]} {last[True]}, {names[1]} {last[False]}")
    throw(True)
    return phases


def _measure(clients: Clients, processes: Sequence[int], on: bool, names: tuple[str, str], seconds: float) -> Phase:
    began, used = time.monotonic(), _cpu_seconds(processes)
    answers = clients.run(seconds)
    used = _cpu_seconds_since(used)
    if problems := clients.problems(answers):
        raise RuntimeError(f"{names[0] if on else names[1]}: {problems[0]}")
    since, until = began + _BEGINS_AFTER, began + seconds
    moments = [moment for answer in answers for moment in answer.times]
    count = sum(since <= moment < until for moment in moments)
    waits = [later - earlier for answer in answers for earlier, later in pairwise(answer.times)]
    return Phase(
        on=on,
        tokens_per_second=count / (until - since),
        ms_between_tokens=1000 * statistics.median(waits),
        cpu_ms_per_token=1000 * used / len(moments),
        contexts=sum(sum(answer.usage) for answer in answers),
        began=began,
        ended=time.monotonic(),
    )


def _cpu_seconds(processes: Iterable[int]) -> dict[int, float]:
    """Of those that live: a spare may have ended."""
    seconds = {}
    for pid in processes:
        with contextlib.suppress(OSError):
            # What follows the name, which may hold anything; user and system time are the 12th and 13th of that.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _cpu_seconds_since(before: Mapping[int, float]) -> float:
    return sum(now - before[pid] for pid, now in _cpu_seconds(before).items())


def ratios(phases: Sequence[Phase], figure: str) -> list[float]:
    """Of each pair: a figure with it on over that with it off."""
    found = []
    for first, second in zip(phases[::2], phases[1::2], strict=True):
        on, off = (first, second) if first.on else (second, first)
        found.append(getattr(on, figure) / getattr(off, figure))
    return found


def of_kind(phases: Sequence[Phase], figure: str, *, on: bool) -> list[float]:
    return [getattr(phase, figure) for phase in phases if phase.on == on]
