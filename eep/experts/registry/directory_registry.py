"""What ranks and backup services tell each other: small records under keys, gone when their writer is.

:class:`Registry` is all that they need of a store. The registry of a single host is here, in a private
directory. The registry of several hosts (``store_registry``) writes its keys under leases.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Protocol

from eep.access import make_private
from eep.experts.registry.record_file import RecordFile, half_bytes, unpack_newest
from eep.room import RoomNotice, is_want_of_room

MOST_BYTES = 8 << 20
"""The largest record. That of a backup of DeepSeek-V3 has a quarter of a megabyte."""

_MOST_FILE_BYTES = 2 * half_bytes(MOST_BYTES)
_PAUSE_S = 0.02
_LOOKS = 100
"""A record that its writer replaces so often during one look counts as not there."""

logger = logging.getLogger(__name__)


class Registry(Protocol):
    def publish(self, key: str, value: bytes) -> None:
        """Show ``value`` under ``key`` for as long as this process lives, in place of an earlier one. Where there is no room
        for it, the earlier one stays until there is."""

    def withdraw(self, key: str) -> None:
        """Show nothing of this process under ``key`` any more. The record may be gone, or another writer's, by now."""

    def scan(self, prefix: str) -> dict[str, bytes]:
        """Everything under keys that begin with ``prefix`` whose writer lives."""


def wait_for_change(registry: Registry, prefix: str, known: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
    """What is under ``prefix`` as soon as that differs from ``known``, or at the latest after ``timeout``."""
    deadline = time.monotonic() + timeout
    while True:
        found = registry.scan(prefix)
        if found != known or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE_S)


class DirectoryRegistry:
    """A registry for the processes of one user on one host.

    A key is a file that its writer keeps locked; the kernel drops the lock with the process, however it ends,
    so a record is there exactly as long as its writer. Files appear whole, by rename. A writer replaces its own record in
    place, which takes no room (:mod:`.record_file`). A record for which there is no room waits in memory. Each later
    :meth:`publish` and :meth:`scan` tries to write it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = make_private(pathlib.Path(path))
        self._lock = threading.RLock()
        self._mine: dict[str, RecordFile] = {}
        self._waiting: dict[str, bytes] = {}
        self._room = RoomNotice(logger, self.path, "ranks may read experts from slower sources in a repair")

    def publish(self, key: str, value: bytes) -> None:
        if len(value) > MOST_BYTES:
            raise ValueError(f"the record {key} has {len(value)} bytes; at most {MOST_BYTES} are allowed")
        with self._lock:
            self._waiting[key] = value
            self._write_waiting()

    def _write_waiting(self) -> None:
        with self._lock:
            for key, value in list(self._waiting.items()):
                try:
                    self._write(key, value)
                except OSError as error:
                    if not is_want_of_room(error):
                        del self._waiting[key]
                        raise
                    self._room.lacking(error)
                else:
                    del self._waiting[key]
            if not self._waiting:
                self._room.found()

    def _write(self, key: str, value: bytes) -> None:
        mine = self._mine.get(key)
        if mine is not None and mine.has_room_for(value) and _is_named(mine.descriptor, self._file(key)):
            mine.replace(value)
            return
        # Locked before it gets its name: every reader of the file finds it held.
        descriptor, unnamed = tempfile.mkstemp(dir=self.path, prefix=".")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made = RecordFile(descriptor, value)
            os.rename(unnamed, self._file(key))
        except BaseException:
            os.close(descriptor)
            pathlib.Path(unnamed).unlink(missing_ok=True)
            raise
        self._mine[key] = made
        if mine is not None:
            os.close(mine.descriptor)

    def withdraw(self, key: str) -> None:
        with self._lock:
            self._waiting.pop(key, None)
            mine = self._mine.pop(key, None)
            if mine is not None:
                # Another writer may have put its record in the place of ours. Should it do so between these two lines, its
                # record is lost. A service that must be found looks for its record, and publishes it again.
                if _is_named(mine.descriptor, path := self._file(key)):
                    with contextlib.suppress(OSError):  # on a read-only disk: it shows nothing once it is not held
                        path.unlink()
                os.close(mine.descriptor)

    def scan(self, prefix: str) -> dict[str, bytes]:
        if self._waiting:
            self._write_waiting()
        records = {}
        for name in sorted(os.listdir(self.path)):
            key = urllib.parse.unquote(name)
            if name.startswith(".") or not key.startswith(prefix):
                continue
            value = _read_if_held(self.path / name)
            if value is not None:
                records[key] = value
        return records

    def sweep(self) -> None:
        """Remove the records of writers that have ended. Only for a registry in which no key ever gets a second writer: the
        record of that one could go instead."""
        for name in os.listdir(self.path):
            path = self.path / name
            with contextlib.suppress(OSError):  # it is gone, or the disk is read-only
                if not name.startswith(".") and not _is_path_held(path):
                    path.unlink()

    def close(self) -> None:
        """Withdraw everything that this object published."""
        for key in [*self._mine, *self._waiting]:
            self.withdraw(key)

    def _file(self, key: str) -> pathlib.Path:
        return self.path / urllib.parse.quote(key, safe="")


def _read_if_held(path: pathlib.Path) -> bytes | None:
    for _ in range(_LOOKS):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as stream:
            if _is_held(descriptor):
                content = stream.read(_MOST_FILE_BYTES + 1)
                if len(content) > _MOST_FILE_BYTES:
                    return None
                if (value := unpack_newest(content)) is not None:
                    return value
            elif _is_named(descriptor, path):
                return None
        # The writer lives: it has replaced the record that was opened here, or twice what was read of it.
    return None


def _is_path_held(path: pathlib.Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # A writer replaces its own record: then the one that was opened here has ended, and the path is held all the same.
        return _is_held(descriptor) or not _is_named(descriptor, path)
    finally:
        os.close(descriptor)


def _is_held(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        # Shared, so that two readers at the same time do not take each other for the writer.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def _is_named(descriptor: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
