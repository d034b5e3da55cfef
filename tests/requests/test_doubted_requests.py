"""Requests that may be what ends ranks: doubted after one exception, given up after two, and no other in their stead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eep.requests.blame import FAILED_TWICE
from eep.requests.ledger import Ledger
from eep.requests.request_records import Counts, Request

COUNTS = Counts(1, 1)


class Ranks:
    """Ranks that serve what a ledger sends them. Each is lost ``failed`` or not, and has its next life at once."""

    def __init__(self, count: int) -> None:
        self.ledger = Ledger()
        self.lives = dict.fromkeys(range(count), 0)
        self.given_up: list[tuple[str, str]] = []
        self.now = 0.0

    def accept(self, *names: str) -> None:
        for name in names:
            self.ledger.accept(Request(name), 0.0)
        self.send()

    def send(self) -> None:
        for name in self.ledger.waiting():
            rank = self.ledger.rank_for(name, self.lives)
            if rank is not None:
                self.ledger.assigned(name, rank, self.lives[rank])

    def at(self, rank: int) -> list[str]:
        entries = [self.ledger.entry(name) for name in list(self.ledger._entries)]
        return [entry.request.id for entry in entries if entry.rank == rank]

    def rank_of(self, name: str) -> int:
        return self.ledger.entry(name).rank

    def give_token(self, name: str, *, last: bool = False) -> None:
        self.ledger.delivered(self.ledger.entry(name).wire, [7], COUNTS, finished=last)
        self.send()

    def lose(self, rank: int, *, failed: bool) -> None:
        outcome = self.ledger.rank_lost(rank, self.lives[rank], self.now, failed=failed)
        self.given_up += outcome.harmful
        self.lives[rank] += 1
        self.send()


def test_a_request_that_was_alone_is_given_up_after_the_second_exception() -> None:
    ranks = Ranks(2)
    ranks.accept("bad")
    ranks.lose(ranks.rank_of("bad"), failed=True)
    assert ranks.given_up == []
    ranks.lose(ranks.rank_of("bad"), failed=True)
    assert ranks.given_up == [("bad", FAILED_TWICE)]
    assert len(ranks.ledger) == 0
    assert ranks.ledger.loads.requests() == {}


def test_a_signal_from_outside_makes_no_doubt() -> None:
    ranks = Ranks(2)
    ranks.accept("good")
    for _ in range(3):
        ranks.lose(ranks.rank_of("good"), failed=False)
    ranks.lose(ranks.rank_of("good"), failed=True)
    assert ranks.given_up == []


def test_a_token_ends_a_doubt() -> None:
    ranks = Ranks(2)
    ranks.accept("good")
    for _ in range(4):
        ranks.lose(ranks.rank_of("good"), failed=True)
        ranks.give_token("good")
    assert ranks.given_up == []


def test_those_that_the_rank_had_given_a_token_are_not_doubted_beside_one_that_had_none() -> None:
    ranks = Ranks(1)
    ranks.accept("old", "new")
    ranks.give_token("old")
    ranks.lose(0, failed=True)
    assert [ranks.ledger.entry(name).is_doubted for name in ("old", "new")] == [False, True]


def test_if_all_had_tokens_all_are_doubted() -> None:
    ranks = Ranks(1)
    ranks.accept("a", "b")
    ranks.give_token("a")
    ranks.give_token("b")
    ranks.lose(0, failed=True)
    assert [ranks.ledger.entry(name).is_doubted for name in ("a", "b")] == [True, True]


def test_a_rank_serves_one_doubted_request_at_a_time() -> None:
    ranks = Ranks(1)
    ranks.accept("bad", "good")
    ranks.lose(0, failed=True)
    assert ranks.at(0) == ["bad"], "the other one waits"
    ranks.lose(0, failed=True)
    assert ranks.given_up == [("bad", FAILED_TWICE)]
    assert ranks.at(0) == ["good"]
    ranks.give_token("good", last=True)
    assert len(ranks.ledger) == 0


def test_what_waits_for_a_doubted_request_goes_on_when_the_doubt_ends() -> None:
    ranks = Ranks(1)
    ranks.accept("a", "b")
    ranks.lose(0, failed=True)
    ranks.give_token("a")
    assert ranks.at(0) == ["a", "b"]


def test_other_requests_keep_away_from_a_doubted_one_where_they_can() -> None:
    ranks = Ranks(2)
    ranks.accept("bad")
    ranks.lose(0, failed=True)
    assert ranks.rank_of("bad") == 0
    ranks.accept("a", "b")
    assert ranks.at(1) == ["a", "b"]
    ranks.lose(1, failed=False)
    alone = Ranks(1)
    alone.accept("bad")
    alone.lose(0, failed=True)
    alone.accept("a")
    assert alone.at(0) == ["bad", "a"], "there is no other rank"


@given(
    count=st.integers(1, 4),
    before=st.integers(0, 6),
    after=st.integers(0, 6),
    turns=st.lists(st.integers(0, 99), max_size=60),
)
def test_one_bad_request_ends_two_ranks_and_no_good_one_is_given_up(
    count: int, before: int, after: int, turns: list[int]
) -> None:
    """Ranks take turns. One that has the bad request fails at its turn; another gives all its requests a token."""
    ranks, failures = Ranks(count), 0
    ranks.accept(*(f"before {number}" for number in range(before)), "bad", *(f"after {n}" for n in range(after)))
    for turn in [*turns, *range(4 * (before + after + 2))]:
        rank = turn % count
        if "bad" in ranks.at(rank):
            failures += 1
            ranks.lose(rank, failed=True)
        else:
            for name in ranks.at(rank):
                ranks.give_token(name)
    assert (ranks.given_up, failures) == ([("bad", FAILED_TWICE)], 2)
    assert not ranks.ledger.has_waiting


def test_ranks_that_fail_together_speak_against_no_request() -> None:
    """On a GPU that ranks share, a fault ends all of them, and each says that an exception ended it."""
    ranks = Ranks(3)
    ranks.accept("good")
    ranks.lose(ranks.rank_of("good"), failed=True)
    for number in range(3):
        ranks.now += 100.0
        other = next(rank for rank in range(3) if rank != ranks.rank_of("good"))
        ranks.lose(other, failed=bool(number % 2))
        ranks.now += 0.3
        ranks.lose(ranks.rank_of("good"), failed=True)
    assert ranks.given_up == []
    ranks.now += 100.0
    ranks.lose(ranks.rank_of("good"), failed=True)
    assert ranks.given_up == [("good", FAILED_TWICE)], "this rank failed alone"
