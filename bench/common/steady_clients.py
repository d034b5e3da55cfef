"""Clients whose load is the same whenever they run, for benchmarks that compare two ways of serving it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eep.drill.load import ask
from eep.drill.query_answers import Answer


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
