"""Steady throughput of a server with and without elasticity, in turns, so that what drifts hits both alike."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fixed_membership import Switch

from eep.drill.load import Answer, ask

_BEGINS_AFTER = 0.5
"""Seconds of load before tokens are counted: the clients' first requests all begin at once."""


@dataclass(frozen=True)
class Phase:
    elastic: bool
    tokens_per_second: float


@dataclass(frozen=True)
class Clients:
    """They stream; client ``i`` asks rank ``i`` modulo the ranks, so that the load is the same in every phase."""

    url: str
    prompts: Sequence[Sequence[int]]
    wanted: Sequence[Sequence[int]]
    ranks: int
    count: int

    def run(self, seconds: float) -> list[Answer]:
        """For so long, and until the last answer is whole."""
        answers: list[Answer] = []
        end = time.monotonic() + seconds

        def stream(client: int) -> None:
            number = client
            while time.monotonic() < end:
                which = number % len(self.prompts)
                tokens = len(self.wanted[which])
                answers.append(ask(self.url, self.prompts[which], tokens, number=which, rank=client % self.ranks))
                number += self.count

        threads = [threading.Thread(target=stream, args=(client,), daemon=True) for client in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 180)
            if thread.is_alive():
                raise TimeoutError("a client got no end of its answer")
        return answers

    def problems(self, answers: Sequence[Answer]) -> list[str]:
        found = [answer.problem for answer in answers if answer.problem]
        wrong = sum(a.tokens != list(self.wanted[a.prompt]) for a in answers if not a.problem)
        return found + ([f"{wrong} answers with a wrong token"] if wrong else [])


def compare(clients: Clients, switch: Switch, pairs: int, seconds: float, say: Callable[[str], None]) -> list[Phase]:
    """``pairs`` of phases of so many seconds, one of each kind; which comes first alternates. RuntimeError if an answer is
    not right."""
    phases: list[Phase] = []
    clients.run(seconds)  # to warm up
    for pair in range(pairs):
        for elastic in (True, False) if pair % 2 == 0 else (False, True):
            switch.throw(elastic=elastic)
            began = time.monotonic()
            answers = clients.run(seconds)
            if problems := clients.problems(answers):
                raise RuntimeError(f"elastic={elastic}: {problems[0]}")
            since, until = began + _BEGINS_AFTER, began + seconds
            count = sum(since <= moment < until for answer in answers for moment in answer.times)
            phases.append(Phase(elastic, count / (until - since)))
        last = {phase.elastic: phase.tokens_per_second for phase in phases[-2:]}
        say(f"pair {pair + 1:2} of {pairs}: elastic {last[True]:.0f} tokens/s, membership fixed {last[False]:.0f}")
    switch.throw(elastic=True)
    return phases


def ratios(phases: Sequence[Phase]) -> list[float]:
    """Of each pair: throughput with elasticity over that without."""
    found = []
    for first, second in zip(phases[::2], phases[1::2], strict=True):
        elastic, fixed = (first, second) if first.elastic else (second, first)
        found.append(elastic.tokens_per_second / fixed.tokens_per_second)
    return found


def median_of(phases: Sequence[Phase], *, elastic: bool) -> float:
    return statistics.median(phase.tokens_per_second for phase in phases if phase.elastic == elastic)
