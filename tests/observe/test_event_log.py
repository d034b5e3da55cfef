"""An event log stays small, and its readers miss nothing of what is there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from eep.observe import event_log
from eep.observe.event_log import EventLine, EventLog, fields_of, older, parse_line, read_events, read_lines

MOST_BYTES = 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    made = EventLog(path, "h", MOST_BYTES)
    yield made
    made.close()


def write(log: EventLog, *epochs: int) -> None:
    for epoch in epochs:
        log.write("RUN", epoch, "because")


def test_a_log_that_is_full_begins_anew_and_the_newest_lines_are_kept(path: Path, log: EventLog) -> None:
    write(log, *range(500))
    longest = max(len(line) for line in read_lines(path))
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 2 * (MOST_BYTES + longest)
    assert {file.name for file in path.parent.iterdir()} == {"events.jsonl", "events.jsonl.old"}
    epochs = [line.epoch for line in read_events(path)]
    assert epochs == list(range(epochs[0], 500))
    assert len(epochs) * longest >= MOST_BYTES
    assert log.lost == 0


def test_a_reader_that_follows_goes_on_in_the_new_log(path: Path, log: EventLog) -> None:
    write(log, 0)
    written = iter(range(1, 100))

    def wait() -> None:
        write(log, *islice(written, 3))

    seen = [parse_line(line).epoch for line in islice(read_lines(path, wait), 100)]
    assert older(path).exists(), "the log never began anew, so this test tests nothing"
    assert seen == list(range(100))


def test_a_reader_that_follows_ends_when_the_log_is_removed(path: Path, log: EventLog) -> None:
    write(log, 0)
    assert [parse_line(line).epoch for line in read_lines(path, path.unlink)] == [0]


def test_a_log_that_cannot_begin_anew_grows_on(path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    write(log, *range(50))
    assert [line.epoch for line in read_events(path)] == list(range(50))
    assert log.lost == 0


def test_lines_wait_in_memory_while_the_disk_is_full(
    path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(log, 0)
    real, room = os.write, 10

    def full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written, room = real(descriptor, data[:room]), 0
        return written

    monkeypatch.setattr(os, "write", full)
    write(log, 1, 2, 3)
    assert [line.epoch for line in read_events(path)] == [0]
    monkeypatch.setattr(os, "write", real)
    write(log, 4)
    assert [line.epoch for line in read_events(path)] == [0, 1, 2, 3, 4]
    assert log.lost == 0
    assert [record.message for record in caplog.records if "df -i" in record.message] == [caplog.records[0].message]


def test_lines_that_find_no_room_in_memory_either_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, "h")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(event_log, "MOST_WAITING", 1000)
        write(log, *range(20))
        log.close()  # raises nothing
    assert 0 < log.lost < 20


@pytest.mark.parametrize("text", ["", "no json", "5", "[]", '{"time": 1}', "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_a_line_that_cannot_be_read_is_told_as_one_of_its_own_kind(text: str) -> None:
    told = fields_of(text)
    assert told["phase"] == "UNREADABLE"
    assert text[:80] in told["cause"]
    assert EventLine(**told).rank is None
