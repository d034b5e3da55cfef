"""The progress word: what its writer says, its reader sees through the page that they share."""

from __future__ import annotations

import mmap
import threading

from eep.control.progress_word import ProgressWord, may_take_long, may_wait_unseen


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


def test_a_word_that_says_that_the_rank_runs_names_its_thread_and_is_progress() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    writer, reader = ProgressWord(page), ProgressWord(page)
    writer.run()
    assert reader.read_run() is None, "nobody has said whose it is"
    writer.own()
    writer.run()
    first = reader.read_run()
    assert first is not None
    assert first[1] == threading.get_native_id()
    writer.run()
    assert first != reader.read_run() is not None
    assert reader.read() is not None
    writer.advance()
    assert reader.read_run() is None, "now it may wait"
    writer.run()
    writer.rest()
    assert reader.read_run() is None


def test_a_word_says_whether_what_runs_may_take_long_as_it_may_until_the_writer_says_otherwise() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    writer, reader = ProgressWord(page), ProgressWord(page)
    writer.own()
    writer.run()
    run = reader.read_run()
    assert run is not None
    assert may_take_long(run[0])
    writer.may_take_long = False
    writer.run()
    run = reader.read_run()
    assert run is not None
    assert not may_take_long(run[0])


def test_a_word_says_whether_what_runs_may_wait_for_a_device_unseen() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    writer, reader = ProgressWord(page), ProgressWord(page)
    writer.own()
    for unseen in (False, True):
        writer.may_wait_unseen = unseen
        writer.run()
        run = reader.read_run()
        assert run is not None
        assert may_wait_unseen(run[0]) == unseen
