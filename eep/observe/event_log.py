"""The event log: one line, a JSON object, for every transition, written as it happens.

Fields: ``time`` (seconds since 1970), ``host``, ``phase``, ``epoch``, ``rank`` and ``incarnation`` (null
where the line is about the whole instance), ``cause``, ``evidence``, ``duration`` (seconds since this host
entered its previous phase; null for lines about one rank) and ``operation`` (the same for all lines of one change).

Where a line cannot be written, because the disk is full, it waits in memory with those that follow it, and is written when
there is room. At most :data:`MOST_WAITING` bytes wait; lines beyond that are lost and counted.

A log that has grown to :data:`MOST_BYTES` gets the name that :func:`older` gives, in place of an earlier one, and a new log
begins. So both together hold the newest lines, and never take much more than twice that.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta

from eep.room import RoomNotice

MOST_BYTES = 8 << 20
MOST_WAITING = 1 << 20
INSTANCE_PHASES = ("FORMING", "REVOKED", "AGREED", "REPAIRED", "RUN")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventLine:
    """One line of the log."""

    time: Annotated[float, Meta(ge=0, lt=1e11)]
    host: str
    phase: str
    epoch: int
    """-1 where it is not known, as to a rank that a fault point meets."""
    rank: int | None
    incarnation: int | None
    cause: str
    evidence: str
    duration: float | None
    operation: str

    def __str__(self) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(self.time)) + f".{int(self.time * 1000) % 1000:03d}"
        who = "" if self.rank is None else f" rank {self.rank}.{self.incarnation}"
        took = "" if self.duration is None else f" after {self.duration * 1000:.1f} ms"
        seen = f" [{self.evidence}]" if self.evidence else ""
        epoch = "" if self.epoch < 0 else f" epoch {self.epoch}"
        return f"{stamp} {self.host}{epoch} {self.phase}{who}{took}: {self.cause}{seen}"


class EventLog:
    """Appends to a file. A line that cannot be written never stops a recovery: only the constructor raises OSError."""

    def __init__(self, path: Path, host: str, most_bytes: int | None = None) -> None:
        """``most_bytes``: the log begins anew when it has so many. For one writer of a log only, its owner."""
        self._path, self._most_bytes = path, most_bytes
        self._file = _open_to_append(path)
        self._waiting = bytearray()
        """Whole lines, but for the first, of which a part may have been written."""
        self._room = RoomNotice(logger, path.parent, "the lines of the event log wait in memory")
        self._host = host
        self._phase_since: float | None = None
        self.lost = 0
        """How many lines were never written."""

    def write(
        self,
        phase: str,
        epoch: int,
        cause: str,
        *,
        rank: int = -1,
        incarnation: int = -1,
        evidence: str = "",
        operation: str = "",
    ) -> None:
        now = time.monotonic()
        duration = None
        if phase in INSTANCE_PHASES:
            duration = None if self._phase_since is None else now - self._phase_since
            self._phase_since = now
        line = EventLine(
            time=time.time(),
            host=self._host,
            phase=phase,
            epoch=epoch,
            rank=rank if rank >= 0 else None,
            incarnation=incarnation if rank >= 0 else None,
            cause=cause,
            evidence=evidence,
            duration=duration,
            operation=operation,
        )
        if self._most_bytes is not None and not self._waiting and self._size() >= self._most_bytes:
            self._begin_anew()
        text = json.dumps(asdict(line)).encode() + b"\n"
        if len(self._waiting) + len(text) > MOST_WAITING:
            self.lost += 1
        else:
            self._waiting += text
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            self._room.lacking(error)
        else:
            self._room.found()

    def _size(self) -> int:
        try:
            return os.fstat(self._file).st_size
        except OSError:
            return 0

    def _begin_anew(self) -> None:
        """At every moment there is a file with the name of the log, so that readers can follow it. If it cannot be done, the
        log grows on."""
        new = self._path.with_name(self._path.name + ".new")
        with suppress(OSError):
            fresh = _open_to_append(new)
            try:
                older(self._path).unlink(missing_ok=True)
                os.link(self._path, older(self._path))
                os.replace(new, self._path)
            except OSError:
                os.close(fresh)
                raise
            os.close(self._file)
            self._file = fresh

    def close(self) -> None:
        self._write_waiting()
        os.close(self._file)


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def parse_line(text: str) -> EventLine:
    """Raises ValueError, with what is wrong, for text that is not a line of an event log."""
    try:
        return msgspec.convert(json.loads(text), EventLine)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not a line of an event log: {text[:80]!r} ({error})") from error


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a line. One that is none, since others wrote to the log, is told as a line of its own kind."""
    try:
        line = parse_line(text)
    except ValueError:
        line = notice_line("UNREADABLE", f"this is not a line of an event log: {text[:80]!r}")
    return asdict(line)


def notice_line(phase: str, cause: str) -> EventLine:
    """A line that stands for others."""
    return EventLine(
        time=time.time(),
        host="",
        phase=phase,
        epoch=0,
        rank=None,
        incarnation=None,
        cause=cause,
        evidence="",
        duration=None,
        operation="",
    )


def older(path: Path) -> Path:
    """Where the lines before those of a log are, once it has begun anew."""
    return path.with_name(path.name + ".old")


def read_events(path: Path) -> Iterator[EventLine]:
    """The lines of a log and of the older one, without a last line that is half written."""
    return map(parse_line, read_lines(path))


def read_lines(path: Path, wait: Callable[[], None] | None = None) -> Iterator[str]:
    """The same as text. With ``wait``, which it calls when there is no more to read, it goes on until the log is removed."""
    before, file = _open_both(path)
    if before is not None:
        with before:
            yield from (text for text in before if text.endswith("\n"))
    while True:
        with file:
            yield from _lines_of(file, path, wait)
        if wait is None or not path.exists():
            return
        file = path.open()


def _open_both(path: Path) -> tuple[IO[str] | None, IO[str]]:
    """The older log, if there is one, and the log itself."""
    while True:
        file = path.open()
        try:
            before = older(path).open()
        except FileNotFoundError:
            return None, file
        if not os.path.samestat(os.fstat(before.fileno()), os.fstat(file.fileno())):
            return before, file
        before.close()  # the log began anew between the two
        file.close()


def _lines_of(file: IO[str], path: Path, wait: Callable[[], None] | None) -> Iterator[str]:
    """Until the end, or with ``wait`` until another file has the name."""
    text = ""
    is_last = False
    while True:
        text += file.readline()
        if text.endswith("\n"):
            yield text
            text = ""
        elif wait is None or is_last:
            return
        elif not _is_named(file, path):
            is_last = True  # what was written before the file lost its name is read first
        else:
            wait()


def _is_named(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
