"""What the answers to a mix of requests are without any fault, and which of them can be compared token by token.

The server is asked several times, with different company each time. An answer that comes out differently without a fault is
either a near tie (:mod:`eep.drill.token_certainty`), which says nothing, or an error, which a drill must report.
"""

from __future__ import annotations

import random
import secrets
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from eep.drill.query_answers import Answer, difference, first_difference, put
from eep.drill.request_mix import Query, with_stop_strings
from eep.drill.token_certainty import LEAST, margin

T = TypeVar("T")
S = TypeVar("S")

CONTINUED_FROM = 8
"""From so many places a greedy answer is continued, as the request of a lost rank is."""
_LOOKS_EVERY = 0.2
NEAR_TIE, OTHER_PATH, UNSTEADY = "near tie", "goes on otherwise", "unsteady"


@dataclass(frozen=True, slots=True)
class Reference:
    query: Query
    answer: Answer


@dataclass
class References:
    """Those that can be compared, and why others were left out."""

    usable: list[Reference] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    unsteady: list[str] = field(default_factory=list)
    """Greedy answers that differed without any fault, and not by a near tie: in float32 each of them is an error. How close
    the tokens of other kinds are is not known, so these are only left out."""
    bad_places: list[tuple[str, int]] = field(default_factory=list)
    """The names of the requests that got those answers, and the place of the first token that differed."""


def learn(
    url: str,
    queries: Sequence[Query],
    clients: int,
    *,
    passes: int = 2,
    exact: bool = True,
    say: Callable[[str], None] = print,
) -> References:
    """Asks a server that loses no rank. RuntimeError if it does not answer a request.

    ``exact``: answers are to be the same token by token, so near ties are looked for and left out. Otherwise all are kept.
    """
    asked = _all_at_once(min(24, clients), lambda query: put(url, query), queries)
    queries = [*queries, *(more := with_stop_strings(queries, [answer.text for answer in asked]))]
    asked += _all_at_once(8, lambda query: put(url, query), more)
    for query, answer in zip(queries, asked, strict=True):
        if answer.problem:
            raise RuntimeError(f"request {query.number} ({query.kind}) has no fault-free answer: {answer.problem}")
    say(f"{len(queries)} requests have their fault-free answers")
    known = [Reference(query, answer) for query, answer in zip(queries, asked, strict=True)]
    found = References()
    if not exact:
        found.usable = known
        return found
    out: dict[int, str] = dict.fromkeys(_near_ties(url, known), NEAR_TIE)
    for _ in range(passes):
        forget_prefixes(url)
        for reference, got, wrong in _ask_again(url, known, clients):
            if not wrong or reference.query.number in out:
                continue
            if not reference.query.is_greedy:
                out[reference.query.number] = UNSTEADY
            elif _is_tied(url, reference, got, clients):
                out[reference.query.number] = OTHER_PATH
            else:
                out[reference.query.number] = UNSTEADY
                found.unsteady.append(f"{reference.query.kind} {reference.query.number}: {wrong}")
                found.bad_places += [(got.name, place)] if (place := first_difference(reference.answer, got)) else []
    greedy = [each for each in known if each.query.is_greedy and each.query.number not in out]
    out |= dict.fromkeys(_unlike_continued(url, greedy, clients), OTHER_PATH)
    found.usable = [each for each in known if each.query.number not in out]
    found.left_out = Counter(out.values())
    say(f"{len(found.usable)} of {len(known)} answers can be compared; left out: {dict(found.left_out) or 'none'}")
    return found


def agreement(url: str, known: Sequence[Reference], clients: int) -> float:
    """The share of answers that come out the same once more, without a fault: the control of a comparison in bfloat16."""
    again = _ask_again(url, known, clients)
    return sum(not wrong for _, _, wrong in again) / len(again)


def forget_prefixes(url: str, within: float = 30.0) -> None:
    """Empties the server's prefix cache, so that prompts are computed again. A rank refuses while it still has a request."""
    request = urllib.request.Request(f"{url}/flush_cache", b"", method="POST")
    end = time.monotonic() + within
    while True:
        try:
            urllib.request.urlopen(request, timeout=60).close()
            return
        except urllib.error.HTTPError as error:
            if time.monotonic() > end:
                raise RuntimeError(f"the server did not empty its prefix cache: HTTP {error.code}") from error
        time.sleep(_LOOKS_EVERY)


def _ask_again(url: str, known: Sequence[Reference], clients: int) -> list[tuple[Reference, Answer, str]]:
    """What came back this time, and what is wrong with it."""
    run = secrets.token_hex(4)
    answers = _all_at_once(
        clients, lambda each: put(url, each.query, name=f"reference-{run}-{each.query.number}"), known
    )
    return [(each, got, got.problem or difference(each.answer, got)) for each, got in zip(known, answers, strict=True)]


def _is_tied(url: str, reference: Reference, other: Answer, clients: int) -> bool:
    """Whether experts of a token are nearly tied: then the answer also goes on otherwise when it is prefilled up to some
    place. Of an error, neither the right answer nor the wrong one is any more likely to."""
    if other.problem:
        return False
    right = Counter(tuple(got.tokens) for got in _all_at_once(4, lambda _: put(url, reference.query), range(4)))
    usual = Reference(reference.query, replace(reference.answer, tokens=list(right.most_common(1)[0][0])))
    return bool(_unlike_continued(url, [usual], clients, everywhere=True))


def _near_ties(url: str, known: Sequence[Reference]) -> list[int]:
    greedy = [each.query for each in known if each.query.is_greedy]
    ahead = _all_at_once(16, lambda query: margin(url, query.prompt, query.tokens), greedy)
    return [query.number for query, nats in zip(greedy, ahead, strict=True) if nats < LEAST]


def _unlike_continued(url: str, greedy: Sequence[Reference], clients: int, *, everywhere: bool = False) -> set[int]:
    """Those whose answer goes on otherwise when it is prefilled up to some place: experts of a token were nearly tied."""
    choose = random.Random(5)
    jobs = []
    for each in greedy:
        places = range(1, each.query.tokens)
        for place in places if everywhere else choose.sample(places, min(CONTINUED_FROM, len(places))):
            body = {**each.query.body, "input_ids": [*each.query.prompt, *each.answer.tokens[:place]]}
            body["sampling_params"] = {**body["sampling_params"], "max_new_tokens": each.query.tokens - place}
            query = Query(each.query.number, "continued", each.query.path, body)
            jobs.append((query, each.answer.tokens[place:]))
    answers = _all_at_once(clients, lambda job: put(url, job[0]), jobs)
    pairs = zip(jobs, answers, strict=True)
    return {query.number for (query, rest), answer in pairs if answer.problem or answer.tokens != rest}


def _all_at_once(clients: int, work: Callable[[S], T], jobs: Iterable[S]) -> list[T]:
    with ThreadPoolExecutor(max(1, clients)) as pool:
        return list(pool.map(work, jobs))
