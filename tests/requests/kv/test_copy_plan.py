"""Which pages of which requests are copied where, and who goes without."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eep.requests.kv.copy_layout import PAGE
from eep.requests.kv.copy_plan import CopyPlan, Moves

ROWS, CONTEXT = 5, 20 * PAGE


class Rank:
    """A journal, and a plan whose moves all succeed unless the test says otherwise."""

    def __init__(self, pages: int) -> None:
        self.plan = CopyPlan(ROWS, CONTEXT, pages)
        self.turns, self.tokens = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)
        self.held: dict[int, tuple[int, int]] = {}
        """By page: what lies there by the moves alone, (row, number)."""

    def next(self, most: int = 1000) -> Moves:
        moves = self.plan.next(self.turns, self.tokens, most)
        for page in moves.given_up.tolist():
            del self.held[page]
        return moves

    def settle(self, moves: Moves, copied: list[bool] | None = None) -> list[bool]:
        asked = np.ones(len(moves.pages), bool) if copied is None else np.array(copied, bool)
        kept = self.plan.settle(moves, asked)
        for page, row, number in zip(
            *(each[kept].tolist() for each in (moves.pages, moves.rows, moves.numbers)), strict=True
        ):
            assert page not in self.held, "a page of two requests"
            self.held[page] = (row, number)
        result: list[bool] = kept.tolist()
        return result

    def copy_all(self) -> None:
        for _ in range(100):
            moves = self.next()
            self.settle(moves)
            if not len(moves.pages):
                return
        raise AssertionError("it never comes to rest")

    def end(self, row: int) -> None:
        self.turns[row] += 1
        self.tokens[row] = 0

    def pages_of(self, row: int) -> int:
        numbers = sorted(number for owner, number in self.held.values() if owner == row)
        assert numbers == list(range(len(numbers))), "there is a gap"
        return len(numbers)


def test_whole_pages_are_copied_as_a_context_grows() -> None:
    rank = Rank(pages=100)
    rank.tokens[2] = PAGE + 5
    rank.copy_all()
    assert (rank.pages_of(2), rank.plan.covered, rank.plan.behind) == (1, PAGE, 0)
    rank.tokens[2] = 2 * PAGE - 1
    assert len(rank.next().pages) == 0
    rank.tokens[2] = 4 * PAGE
    moves = rank.next()
    assert (moves.rows.tolist(), moves.numbers.tolist()) == ([2, 2, 2], [1, 2, 3])


def test_a_long_prompt_is_copied_part_by_part_and_the_longest_comes_first() -> None:
    rank = Rank(pages=100)
    rank.tokens[:3] = PAGE, 7 * PAGE, 2 * PAGE
    first = rank.next(most=5)
    assert (first.rows.tolist(), first.numbers.tolist()) == ([1] * 5, [0, 1, 2, 3, 4])
    assert rank.plan.behind == 10 * PAGE
    rank.settle(first)
    second = rank.next(most=4)
    assert (second.rows.tolist(), second.numbers.tolist()) == ([1, 1, 2, 2], [5, 6, 0, 1])


def test_what_was_not_copied_whole_is_copied_again() -> None:
    rank = Rank(pages=100)
    rank.tokens[:2] = 3 * PAGE, 2 * PAGE
    moves = rank.next()
    assert rank.settle(moves, [True, False, True, True, True]) == [False, False, False, True, True]
    again = rank.next()
    assert (again.rows.tolist(), again.numbers.tolist()) == ([0, 0, 0], [0, 1, 2])


def test_pages_of_a_request_that_has_ended_are_free_at_once() -> None:
    rank = Rank(pages=3)
    rank.tokens[0] = 3 * PAGE
    rank.copy_all()
    rank.end(0)
    rank.tokens[0] = 2 * PAGE  # of another request, in the same row
    moves = rank.next()
    assert sorted(moves.given_up.tolist()) == [0, 1, 2]
    rank.settle(moves)
    assert rank.pages_of(0) == 2


def test_who_has_the_least_to_lose_goes_without() -> None:
    rank = Rank(pages=10)
    rank.tokens[:2] = 3 * PAGE, 6 * PAGE
    rank.copy_all()
    rank.tokens[2] = 9 * PAGE
    rank.copy_all()
    assert [rank.pages_of(row) for row in range(3)] == [0, 1, 9]
    assert rank.plan.behind == 8 * PAGE
    rank.end(2)
    rank.copy_all()
    assert [rank.pages_of(row) for row in range(3)] == [3, 6, 0]


def test_requests_of_about_the_same_size_do_not_take_pages_from_each_other() -> None:
    rank = Rank(pages=15)
    rank.tokens[:2] = 9 * PAGE, 8 * PAGE
    rank.copy_all()
    assert [rank.pages_of(row) for row in range(2)] == [9, 6]
    rank.tokens[1] = 10 * PAGE
    rank.copy_all()
    assert [rank.pages_of(row) for row in range(2)] == [9, 6]
    rank.tokens[1] = 16 * PAGE
    rank.copy_all()
    assert [rank.pages_of(row) for row in range(2)] == [0, 15]


class AnyCourse(RuleBasedStateMachine):
    """Requests grow and end in any order, copies fail, and there may not be room for all."""

    @initialize(pages=st.integers(1, 40))
    def begin(self, pages: int) -> None:
        self.pages, self.rank = pages, Rank(pages)

    @rule(row=st.integers(0, ROWS - 1), by=st.integers(1, 8 * PAGE))
    def grow(self, row: int, by: int) -> None:
        self.rank.tokens[row] = min(CONTEXT, self.rank.tokens[row] + by)

    @rule(row=st.integers(0, ROWS - 1))
    def end(self, row: int) -> None:
        self.rank.end(row)

    @rule(most=st.integers(1, 12), data=st.data())
    def copy(self, most: int, data: st.DataObject) -> None:
        moves = self.rank.next(most)
        count = len(moves.pages)
        assert count <= most
        self.rank.settle(moves, data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))

    @rule()
    def rest(self) -> None:
        """Nobody goes without while a request of less than half its size has pages."""
        self.rank.copy_all()
        whole = self.rank.tokens // PAGE
        for row in range(ROWS):
            if self.rank.pages_of(row) < whole[row]:
                smaller = [other for other in range(ROWS) if whole[other] < whole[row] / 2]
                assert [self.rank.pages_of(other) for other in smaller] == [0] * len(smaller)
                assert len(self.rank.held) == self.pages, "there was room"

    @invariant()
    def counts(self) -> None:
        for row in range(ROWS):
            assert self.rank.pages_of(row) <= CONTEXT // PAGE
        assert self.rank.plan.covered == PAGE * len(self.rank.held)


TestAnyCourse = AnyCourse.TestCase


@settings(max_examples=50)
@given(st.lists(st.integers(0, CONTEXT), min_size=ROWS, max_size=ROWS))
def test_with_room_for_all_nothing_is_behind(tokens: list[int]) -> None:
    rank = Rank(pages=ROWS * CONTEXT // PAGE)
    rank.tokens[:] = tokens
    rank.copy_all()
    assert rank.plan.behind == 0
    assert [rank.pages_of(row) for row in range(ROWS)] == [each // PAGE for each in tokens]
