"""Steady throughput of a server with and without elasticity, in turns, so that what drifts hits both alike."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.failover.fixed_membership import Switch
from eep.drill.load import ask
from eep.drill.query_answers import Answer

_BEGINS_AFTER = 0.5
"""Seconds of load before tokens are counted: the clients' first requests all begin at once."""


@dataclass(frozen=True)
class Phase:
    elastic: bool
    tokens_per_second: float
    ms_between_tokens: float
    """The median wait of a client for its next token. Unlike throughput it hardly depends on how the beginnings of requests
    happen to fall, which makes phases of a few seconds differ by several per cent."""
    cpu_ms_per_token: float
    """Processor time of all processes of the server. Says more than throughput where others use the processor too."""

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.0f} tokens/s ({self.ms_between_tokens:.2f} ms apart, "
            f"{self.cpu_ms_per_token:.2f} ms of processor each)"
        )


@dataclass(frozen=True)
class Clients:
    """They stream; client ``i`` asks rank ``i`` modulo the ranks, so that the load is the same in every phase.

    Answers have different lengths, up to ``tokens``, the same ones in every phase. Were they alike, clients would fall into
    step with each other in some phases and not in others: prompts that come together are one pause for all, and such a phase
    has a third more tokens. What goes beyond the wanted answer is not checked.
    """

    url: str
    prompts: Sequence[Sequence[int]]
    wanted: Sequence[Sequence[int]]
    ranks: int
    count: int
    tokens: int

    def run(self, seconds: float) -> list[Answer]:
        """For so long, and until the last answer is whole."""
        answers: list[Answer] = []
        end = time.monotonic() + seconds

        def stream(client: int) -> None:
            number, choose = client, random.Random(client)
            while time.monotonic() < end:
                answers.append(self.ask(client, number, choose.randint(self.tokens // 2, self.tokens)))
                number += self.count

        threads = [threading.Thread(target=stream, args=(client,), daemon=True) for client in range(self.count)]
        for thread in threads:
            thread.start()
        join(threads, seconds + 180)
        return answers

    def ask(self, client: int, number: int, tokens: int) -> Answer:
        which = number % len(self.prompts)
        return ask(self.url, self.prompts[which], tokens, number=which, rank=client % self.ranks)

    def problems(self, answers: Sequence[Answer]) -> list[str]:
        found = [answer.problem for answer in answers if answer.problem]
        wrong = sum(_differ(a.tokens, self.wanted[a.prompt]) for a in answers if not a.problem)
        return found + ([f"{wrong} answers with a wrong token"] if wrong else [])


def join(clients: Sequence[threading.Thread], within: float) -> None:
    """TimeoutError if one has not ended by then."""
    end = time.monotonic() + within
    for client in clients:
        client.join(max(0.0, end - time.monotonic()))
        if client.is_alive():
            raise TimeoutError(f"a client got no end of its answer within {within:.0f} s")


def _differ(tokens: Sequence[int], wanted: Sequence[int]) -> bool:
    """Where both say something."""
    return any(one != other for one, other in zip(tokens, wanted, strict=False))


def compare(
    clients: Clients,
    switch: Switch,
    processes: Sequence[int],
    pairs: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[Phase]:
    """``pairs`` of phases of so many seconds, one of each kind; which comes first alternates. ``processes`` are those of
    the server. RuntimeError if an answer is not right."""
    phases: list[Phase] = []
    clients.run(seconds)  # to warm up
    for pair in range(pairs):
        for elastic in (True, False) if pair % 2 == 0 else (False, True):
            switch.throw(elastic=elastic)
            phases.append(_measure(clients, processes, elastic, seconds))
        last = {phase.elastic: phase for phase in phases[-2:]}
        say(f"pair {pair + 1:2} of {pairs}: elastic {last[True]}, membership fixed {last[False]}")
    switch.throw(elastic=True)
    return phases


def _measure(clients: Clients, processes: Sequence[int], elastic: bool, seconds: float) -> Phase:
    began, used = time.monotonic(), _cpu_seconds(processes)
    answers = clients.run(seconds)
    used = _cpu_seconds_since(used)
    if problems := clients.problems(answers):
        raise RuntimeError(f"elastic={elastic}: {problems[0]}")
    since, until = began + _BEGINS_AFTER, began + seconds
    moments = [moment for answer in answers for moment in answer.times]
    count = sum(since <= moment < until for moment in moments)
    waits = [later - earlier for answer in answers for earlier, later in pairwise(answer.times)]
    return Phase(
        elastic=elastic,
        tokens_per_second=count / (until - since),
        ms_between_tokens=1000 * statistics.median(waits),
        cpu_ms_per_token=1000 * used / len(moments),
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
    """Of each pair: a figure with elasticity over that without."""
    found = []
    for first, second in zip(phases[::2], phases[1::2], strict=True):
        elastic, fixed = (first, second) if first.elastic else (second, first)
        found.append(getattr(elastic, figure) / getattr(fixed, figure))
    return found


def median_of(phases: Sequence[Phase], figure: str, *, elastic: bool) -> float:
    return statistics.median(getattr(phase, figure) for phase in phases if phase.elastic == elastic)


def mean_of(phases: Sequence[Phase], figure: str, *, elastic: bool) -> float:
    return statistics.fmean(getattr(phase, figure) for phase in phases if phase.elastic == elastic)
