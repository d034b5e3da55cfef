"""What a rank writes down about contexts, and what a survivor makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eep.requests.kv.kv_journal import JournalReader, KvJournal, fingerprint, journal_bytes

ROWS = 8


def memory() -> np.ndarray:
    return np.zeros(journal_bytes(ROWS), np.uint8)


def note(journal: KvJournal, *lines: tuple[int, str, int]) -> None:
    """Rows, requests and tokens of a step."""
    for row, wire, _ in lines:
        journal.name(row, fingerprint(wire))
    journal.count(np.array([row for row, _, _ in lines]), np.array([tokens for _, _, tokens in lines]))


def test_a_survivor_finds_what_was_noted() -> None:
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=3), JournalReader(shared)
    note(journal, (2, "a", 10), (5, "b~1", 700))
    line = reader.find(3, "b~1")
    assert line is not None
    assert (line.row, line.tokens) == (5, 700)
    assert reader.find(3, "b") is None
    assert reader.find(2, "b~1") is None, "of another life"


def test_a_line_that_was_withdrawn_or_given_to_another_no_longer_stands() -> None:
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=0), JournalReader(shared)
    note(journal, (2, "a", 10))
    line = reader.find(0, "a")
    assert line is not None
    note(journal, (2, "a", 11))
    assert reader.stands(line), "it has only grown"
    journal.withdraw(2)
    assert not reader.stands(line)
    assert reader.find(0, "a") is None
    note(journal, (2, "c", 50))
    assert not reader.stands(line)


def test_a_count_that_comes_after_the_row_was_given_up_names_nothing() -> None:
    """With overlap, a step may hold a request that has ended since."""
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=0), JournalReader(shared)
    note(journal, (2, "a", 10))
    line = reader.find(0, "a")
    assert line is not None
    journal.withdraw(2)
    journal.count(np.array([2]), np.array([11]))
    assert not reader.stands(line)
    assert reader.find(0, "a") is None
    journal.name(2, fingerprint("b"))
    assert reader.find(0, "b") is None, "the count was another request's"


def test_a_name_that_is_given_again_keeps_its_count() -> None:
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=0), JournalReader(shared)
    note(journal, (2, "a", 10))
    journal.name(2, fingerprint("a"))
    line = reader.find(0, "a")
    assert line is not None
    assert line.tokens == 10


def test_the_next_life_begins_with_nothing() -> None:
    shared = memory()
    note(KvJournal(shared, ROWS, life=0), (2, "a", 10))
    reader = JournalReader(shared)
    line = reader.find(0, "a")
    assert line is not None
    KvJournal(shared, ROWS, life=1)
    assert not reader.stands(line)
    assert reader.find(0, "a") is None
    assert reader.find(1, "a") is None


def test_memory_that_is_no_journal_has_no_lines() -> None:
    assert JournalReader(memory()).find(0, "a") is None
    with pytest.raises(ValueError, match="a journal of 9 rows"):
        KvJournal(memory(), ROWS + 1, life=0)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.sampled_from("abcdef"), st.integers(0, 99)), max_size=40))
def test_a_line_is_always_of_the_request_that_had_the_row_last(steps: list[tuple[int, str, int]]) -> None:
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=0), JournalReader(shared)
    rows: dict[int, tuple[str, int]] = {}
    for row, name, tokens in steps:
        for other in [each for each, (held, _) in rows.items() if held == name and each != row]:
            journal.withdraw(other)
            del rows[other]
        if tokens == 0:
            journal.withdraw(row)
            rows.pop(row, None)
        else:
            note(journal, (row, name, tokens))
            rows[row] = (name, tokens)
    for name in "abcdef":
        line = reader.find(0, name)
        assert (None if line is None else (line.row, (name, line.tokens))) == next(
            ((row, held) for row, held in rows.items() if held[0] == name), None
        )


def test_a_turn_of_a_row_ends_when_its_line_is_withdrawn() -> None:
    journal = KvJournal(memory(), ROWS, life=0)
    note(journal, (2, "a", 10), (5, "b", 20))
    seen = journal.look()
    assert seen.tokens.tolist() == [0, 0, 10, 0, 0, 20, 0, 0]
    assert tuple(seen.requests[5].tolist()) == fingerprint("b")
    note(journal, (2, "a", 11))
    assert (journal.turns == seen.turns).all()
    journal.withdraw(2)
    journal.count(np.array([2]), np.array([12]))
    assert np.flatnonzero(journal.turns != seen.turns).tolist() == [2]
    assert journal.look().tokens[2] == 0, "the row has no name"
    journal.withdraw_all()
    assert (journal.turns > seen.turns).all()


def test_what_was_taken_is_no_longer_pending() -> None:
    memory = np.zeros(journal_bytes(4), np.uint8)
    journal = KvJournal(memory, 4, 3)
    for row, tokens in ((1, 40), (2, 16), (3, 17)):
        journal.name(row, fingerprint(f"request-{row}"))
        journal.count(np.array([row]), np.array([tokens]))
    reader = JournalReader(memory)
    assert (reader.pending(1), reader.pending(17)) == (3, 2)
    line = reader.find(3, "request-1")
    assert line is not None
    reader.take(line)
    assert reader.pending(17) == 1
    assert reader.find(3, "request-1") is None
    KvJournal(memory, 4, 4)
    assert reader.pending(1) == 0
    reader.take(line)  # of a life that is over, it changes nothing
    assert reader.pending(1) == 0
