"""The progress word: what its writer says, its reader sees through the page that they share."""

from __future__ import annotations

import mmap

from eep.control.progress_word import ProgressWord


def test_the_word_changes_with_each_advance_and_says_nothing_before_and_at_rest() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    writer, reader = ProgressWord(page), ProgressWord(page)
    assert reader.read() is None
    writer.advance()
    first = reader.read()
    writer.advance()
    assert None is not first != reader.read() is not None
    writer.rest()
    assert reader.read() is None
    writer.advance()
    assert reader.read() is not None
