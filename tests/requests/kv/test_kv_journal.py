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


def test_a_survivor_finds_what_was_noted() -> None:
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=3), JournalReader(shared)
    journal.note([2, 5], [fingerprint("a"), fingerprint("b~1")], [10, 700])
    line = reader.find(3, "b~1")
    assert line is not None
    assert (line.row, line.tokens) == (5, 700)
    assert reader.find(3, "b") is None
    assert reader.find(2, "b~1") is None, "of another life"


def test_a_line_that_was_withdrawn_or_given_to_another_no_longer_stands() -> None:
    shared = memory()
    journal, reader = KvJournal(shared, ROWS, life=0), JournalReader(shared)
    journal.note([2], [fingerprint("a")], [10])
    line = reader.find(0, "a")
    assert line is not None
    journal.note([2], [fingerprint("a")], [11])
    assert reader.stands(line), "it has only grown"
    journal.withdraw(2)
    assert not reader.stands(line)
    assert reader.find(0, "a") is None
    journal.note([2], [fingerprint("c")], [50])
    assert not reader.stands(line)


def test_the_next_life_begins_with_nothing() -> None:
    shared = memory()
    KvJournal(shared, ROWS, life=0).note([2], [fingerprint("a")], [10])
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


@settings(max_examples=100, deadline=None)
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
            journal.note([row], [fingerprint(name)], [tokens])
            rows[row] = (name, tokens)
    for name in "abcdef":
        line = reader.find(0, name)
        assert (None if line is None else (line.row, (name, line.tokens))) == next(
            ((row, held) for row, held in rows.items() if held[0] == name), None
        )
