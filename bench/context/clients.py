"""The clients of one kill: some ask for a long answer to a long prompt once, others for short ones again and again."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from bench.context.plan import make_prompts
from eep.drill.load import ask
from eep.drill.query_answers import Answer
from eep.drill.token_certainty import AT_ONCE, LEAST, weigh_answer

SHORT = (4, 40)
"""Tokens of a short prompt."""
_WITHIN = 600.0
"""Seconds that an answer may take: on a busy CPU long prompts take minutes."""
_CONTINUED_FROM = 8
_CANDIDATES = 4
"""For each prompt that is needed: the model is not sure of every answer."""


@dataclass(frozen=True)
class Known:
    """Prompts and their fault-free answers."""

    prompts: list[list[int]]
    wanted: list[list[int]]


def learn(
    url: str,
    choose: random.Random,
    count: int,
    lengths: tuple[int, int],
    tokens: int,
    *,
    ranks: int,
    continued: bool,
    exact: bool = True,
) -> Known:
    """Asks for the answers. Prompts of whose answers the model is not sure are left out (``eep.drill.token_certainty``),
    unless answers need not be ``exact``. ``continued``: they must also go on alike from some of their places, at another
    rank. To compute a long prompt takes seconds, so just two ranks do it. ValueError if too few are left."""
    candidates = iter(make_prompts(choose, _CANDIDATES * count, *lengths))
    known = Known([], [])
    places = choose.sample(range(tokens), min(_CONTINUED_FROM, tokens)) if continued and exact else []
    with ThreadPoolExecutor(AT_ONCE) as clients:
        while some := list(islice(candidates, count)):
            jobs = range(len(some))
            weighed = clients.map(lambda job: weigh_answer(url, some[job], tokens, _WITHIN, job % ranks), jobs)
            for job, (answer, ahead) in enumerate(list(weighed)):
                if exact and (ahead < LEAST or not _goes_on(url, some[job], answer, places, (job + 1) % ranks)):
                    continue
                known.prompts.append(some[job])
                known.wanted.append(answer)
                if len(known.prompts) == count:
                    return known
    raise ValueError(
        f"of {_CANDIDATES * count} prompts of {lengths[0]} to {lengths[1]} tokens the model is sure of {len(known.prompts)} "
        f"answers; {count} are needed: try another --seed"
    )


def _goes_on(url: str, prompt: Sequence[int], wanted: Sequence[int], places: Sequence[int], rank: int) -> bool:
    """Whether the answer is the same from each of these places on, if what was before is prefilled."""

    def is_alike(place: int) -> bool:
        left = len(wanted) - place
        rest = ask(url, [*prompt, *wanted[:place]], left, rank=rank, timeout=_WITHIN)
        return not rest.problem and rest.tokens == list(wanted[place:])

    with ThreadPoolExecutor(max(1, len(places))) as clients:
        return all(clients.map(is_alike, places))


class LongClients:
    """Each asks one prompt of a rank: those of ``known`` in turn, and the ranks in turn, from rank ``first`` on."""

    def __init__(self, url: str, known: Known, ranks: int, first: int = 0) -> None:
        self.answers: list[Answer] = []
        self._known = known
        self._seen = [0] * len(known.prompts)
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._ask, args=(url, number, (first + number) % ranks), daemon=True)
            for number in range(len(known.prompts))
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_tokens(self, tokens: int) -> None:
        """Until every client has so many. RuntimeError if one gets no more, or not in time."""
        with self._news:
            if not self._news.wait_for(lambda: min(self._seen) >= tokens or bool(self.failed), _WITHIN):
                raise RuntimeError(
                    f"long requests got {min(self._seen)} tokens in {_WITHIN:g} s, {tokens} were waited for"
                )
            if self.failed:
                raise RuntimeError(f"a long request failed before its rank was killed: {self.failed[0].problem}")

    def join(self) -> None:
        """Until all have their answers. TimeoutError if they do not get them."""
        end = time.monotonic() + _WITHIN
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"{stuck} long requests got no end of their answer within {_WITHIN:.0f} s")

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.problem]

    @property
    def wrong(self) -> list[Answer]:
        return [each for each in self.answers if not each.problem and each.tokens != self._known.wanted[each.prompt]]

    def _ask(self, url: str, number: int, rank: int) -> None:
        def seen(tokens: int) -> None:
            with self._news:
                self._seen[number] = tokens
                self._news.notify_all()

        prompt, tokens = self._known.prompts[number], len(self._known.wanted[number])
        answer = ask(url, prompt, tokens, number=number, rank=rank, timeout=_WITHIN, seen=seen)
        with self._news:
            self.answers.append(answer)
            self._news.notify_all()


def flush(url: str, within: float = 30.0) -> None:
    """Empties the prefix caches of all ranks: the prompts come again. RuntimeError if the server does not do it."""
    end = time.monotonic() + within
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", b"", method="POST"), timeout=30):
                return
        except OSError as error:  # a rank is busy with the last tokens of an answer that was given up
            if time.monotonic() > end:
                raise RuntimeError(f"the prefix caches could not be emptied: {error}") from error
        time.sleep(0.2)


def count_tokens(url: str) -> tuple[int, int]:
    """How many tokens of moved requests were restored, and how many were not, since the server started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return _sum(lines, "eep_kv_restored_tokens_total"), _sum(lines, "eep_kv_recomputed_tokens_total")


def _sum(lines: Sequence[str], name: str) -> int:
    return round(
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)
    )
