"""Records live exactly as long as their writers, and what cannot be is dropped."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eep.errors import EepError
from eep.experts.registry.directory_registry import MOST_BYTES, DirectoryRegistry, wait_for_change
from eep.experts.registry.published_records import (
    BACKUPS,
    BackupExtent,
    BackupRecord,
    BadRecord,
    ModelShape,
    RankRecord,
    decode_record,
    decode_records,
    encode_record,
)
from eep.experts.registry.record_file import half_bytes, pack_half, unpack_newest

WRITER = """
import sys, time
from eep.experts.registry.directory_registry import DirectoryRegistry
registry = DirectoryRegistry(sys.argv[1])
registry.publish("backups/other", b"record")
print("there", flush=True)
time.sleep(600)
"""


def test_a_record_goes_with_its_writer(tmp_path: pathlib.Path) -> None:
    registry = DirectoryRegistry(tmp_path / "registry")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "registry")], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        known = registry.scan("backups/")
        assert known == {"backups/other": b"record"}
        os.kill(writer.pid, signal.SIGKILL)
        assert wait_for_change(registry, "backups/", known, timeout=60) == {}


def test_a_sweep_removes_the_files_of_writers_that_have_ended(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "registry"
    registry = DirectoryRegistry(path)
    registry.publish("held/mine", b"1")
    registry.publish("held/mine", b"2")
    (path / ".half").write_bytes(b"a writer is about to lock and name it")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        registry.sweep()
        assert registry.scan("") == {"held/mine": b"2", "backups/other": b"record"}
        os.kill(writer.pid, signal.SIGKILL)
    registry.sweep()
    assert sorted(os.listdir(path)) == [".half", "held%2Fmine"]
    assert registry.scan("") == {"held/mine": b"2"}


def test_records_are_replaced_and_withdrawn(tmp_path: pathlib.Path) -> None:
    first, second = DirectoryRegistry(tmp_path / "r"), DirectoryRegistry(tmp_path / "r")
    first.publish("ranks/0", b"a")
    second.publish("ranks/1", b"b")
    first.publish("ranks/0", b"c")
    assert second.scan("ranks/") == first.scan("") == {"ranks/0": b"c", "ranks/1": b"b"}
    first.withdraw("ranks/0")
    first.withdraw("ranks/0")
    assert second.scan("ranks/") == {"ranks/1": b"b"}
    second.close()
    assert os.listdir(tmp_path / "r") == []
    with pytest.raises(ValueError, match="at most 8388608 are allowed"):
        first.publish("ranks/0", b"x" * (MOST_BYTES + 1))
    assert os.listdir(tmp_path / "r") == []


def test_withdrawing_leaves_the_record_of_the_next_writer(tmp_path: pathlib.Path) -> None:
    """As when a service is replaced by a new one of its name, and ends a moment later."""
    old, new = DirectoryRegistry(tmp_path / "r"), DirectoryRegistry(tmp_path / "r")
    old.publish("backups/host", b"old")
    new.publish("backups/host", b"new")
    old.withdraw("backups/host")
    assert new.scan("") == {"backups/host": b"new"}
    old.publish("backups/host", b"old")
    new.publish("backups/host", b"new")
    old.close()
    assert new.scan("") == {"backups/host": b"new"}
    new.close()
    assert os.listdir(tmp_path / "r") == []


def test_a_record_that_is_replaced_during_a_look_is_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = DirectoryRegistry(tmp_path / "r"), DirectoryRegistry(tmp_path / "r")
    writer.publish("ranks/0", b"one")
    lock, looks = fcntl.flock, list[int]()

    def replaced_first(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            looks.append(descriptor)
            if len(looks) == 1:
                writer.publish("ranks/0", b"two")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    assert reader.scan("") == {"ranks/0": b"two"}
    monkeypatch.setattr(fcntl, "flock", lock)
    writer.close()
    assert reader.scan("") == {}


def test_a_record_is_replaced_while_the_disk_is_full(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = DirectoryRegistry(tmp_path / "r"), DirectoryRegistry(tmp_path / "r")
    writer.publish("held/r0.i0", b"one")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        for number in range(5):
            writer.publish("held/r0.i0", b"%d" % number)
            assert reader.scan("") == {"held/r0.i0": b"%d" % number}
        for value in (b"new", b"newer"):
            writer.publish("margin", value)
        assert reader.scan("") == {"held/r0.i0": b"4"}
        assert os.listdir(tmp_path / "r") == ["held%2Fr0.i0"], "half a record was left"
    assert len(caplog.records) == 1
    assert writer.scan("") == reader.scan("") == {"held/r0.i0": b"4", "margin": b"newer"}
    writer.close()
    assert os.listdir(tmp_path / "r") == []


def test_a_reader_takes_the_newest_half_that_is_whole() -> None:
    old, new = pack_half(1, b"old").ljust(half_bytes(3), b"\0"), pack_half(2, b"new").ljust(half_bytes(3), b"\0")
    torn = new.replace(b"new", b"neu")
    assert unpack_newest(old + new) == unpack_newest(new + old) == b"new"
    assert unpack_newest(old + bytes(len(old))) == b"old"
    assert unpack_newest(old + torn) == b"old"
    assert unpack_newest(bytes(len(old)) * 2) is None
    assert unpack_newest(b"") is None


@pytest.mark.parametrize("content", [b"x", b"x" * 100, b"\xff" * 9000])
def test_what_is_no_record_file_has_no_record(content: bytes) -> None:
    assert unpack_newest(content) is None


def test_a_directory_that_others_can_enter_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(EepError, match="chmod 700"):
        DirectoryRegistry(tmp_path / "open")


SHAPE = ModelShape(2, 3, (10, 6))


def backup(*numbers: int, shape: ModelShape | None = SHAPE) -> BackupRecord:
    ids = np.array(numbers, dtype="<i8").tobytes()
    return BackupRecord(0, "127.0.0.1:1", shape, (BackupExtent(4096, ids, bytes(len(ids))),))


def test_records_survive_the_journey() -> None:
    record = backup(4, 1)
    assert decode_record(encode_record(record), BackupRecord) == record
    assert record.addresses() == {4: 4096, 1: 4096 + 16}


@pytest.mark.parametrize(
    "record",
    [
        backup(6),
        backup(-1),
        backup(1, shape=None),
        BackupRecord(0, "s", SHAPE, (BackupExtent(0, b"1234567", b"1234567"),)),
        BackupRecord(0, "s", SHAPE, (BackupExtent(0, bytes(8), bytes(16)),)),
        RankRecord(0, "s", 0, 1, SHAPE, bytes(8), bytes(16)),
        RankRecord(0, "s", 0, 1, SHAPE, np.array([0, 6], dtype="<i8").tobytes(), bytes(16)),
    ],
)
def test_impossible_records_are_dropped(record: RankRecord | BackupRecord) -> None:
    with pytest.raises(BadRecord):
        encode_record(record)
    raw = msgspec.msgpack.encode(record)
    with pytest.raises(BadRecord):
        decode_record(raw, type(record))
    good = encode_record(backup(2))
    assert set(decode_records({"backups/a": good, "backups/b": raw}, BACKUPS, BackupRecord)) == {"a"}


@given(st.binary(max_size=200))
@example(b"\xdf\x00\x00\x00\x01\xa4\x00\x00\x00\x80")  # the name of a field that is no text
def test_garbage_is_a_bad_record_and_nothing_else(value: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_record(value, BackupRecord)
