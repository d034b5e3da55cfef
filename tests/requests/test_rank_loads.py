"""Which rank a request goes to."""

from __future__ import annotations

import pytest

from eep.requests.ledger import Ledger
from eep.requests.rank_loads import Measure, RankLoads
from eep.requests.request_records import Counts, Request


def test_the_least_loaded_rank_is_chosen() -> None:
    loads = RankLoads()
    for rank, tokens in ((1, 5), (1, 5), (2, 90), (3, 20)):
        loads.add(rank, tokens)
    assert loads.least([3, 1, 2]) == 3, "as many requests as rank 2 has, of fewer tokens"
    assert loads.least([3, 1, 2], Measure.TOKENS) == 1
    assert loads.least([3, 0, 2, 4]) == 0, "the lowest of equals"
    assert loads.least([]) is None


def send(ledger: Ledger, name: str, active: tuple[int, ...], incarnation: int = 0) -> int:
    rank = ledger.rank_for(name, active)
    assert rank is not None
    ledger.assigned(name, rank, incarnation)
    return rank


def loaded(measure: Measure = Measure.REQUESTS) -> Ledger:
    """Rank 0 has a long request and three short ones; ranks 1 and 2 have one each, of ten tokens and of a thousand."""
    ledger = Ledger(measure)
    sizes = {"other": 10, "large": 1000, "long": 900, "a": 5, "b": 5, "c": 5}
    for name, tokens in sizes.items():
        ledger.accept(Request(name, 50, prompt_tokens=tokens), 0.0)
    for name, rank in (("other", 1), ("large", 2), ("long", 0), ("a", 0), ("b", 0), ("c", 0)):
        ledger.assigned(name, rank, 0)
    return ledger


def test_what_a_lost_rank_leaves_is_spread_by_tokens() -> None:
    ledger = loaded()
    ledger.delivered("a", [1, 2, 3], Counts(5, 3))
    ledger.rank_lost(0, 0, 1.0)
    went = {name: send(ledger, name, (1, 2)) for name in ledger.waiting()}
    assert went == {"long": 1, "a": 1, "b": 1, "c": 1}, "rank 2 has a thousand tokens already"
    assert ledger.loads.tokens() == {1: 10 + 900 + 8 + 5 + 5, 2: 1000}


@pytest.mark.parametrize(("measure", "rank"), [(Measure.REQUESTS, 1), (Measure.TOKENS, 1)])
def test_a_rank_that_is_back_is_filled_first(measure: Measure, rank: int) -> None:
    ledger = loaded(measure)
    ledger.rank_lost(1, 0, 1.0)
    ledger.accept(Request("new", 50, prompt_tokens=7), 1.0)
    assert send(ledger, "new", (0, 1, 2), 1) == rank


def test_a_new_request_goes_by_the_measure_that_was_chosen() -> None:
    for measure, wanted in ((Measure.REQUESTS, 2), (Measure.TOKENS, 0)):
        ledger = loaded(measure)
        ledger.accept(Request("new", 50, prompt_tokens=7), 1.0)
        assert send(ledger, "new", (0, 2)) == wanted


def test_nothing_is_left_when_all_requests_are_over() -> None:
    ledger = loaded()
    ledger.delivered("long", [1, 2], Counts(900, 2))
    ledger.rank_lost(0, 0, 1.0)
    for name in ledger.waiting():
        send(ledger, name, (1, 2))
    ledger.delivered("long~1", [3], Counts(900, 1), finished=True)
    for name in ("other", "large", "a", "b", "c"):
        ledger.ended(name)
    assert (ledger.loads.requests(), ledger.loads.tokens()) == ({}, {})
