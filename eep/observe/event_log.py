"""The event log: one line, a JSON object, for every transition, written as it happens.

Fields: ``time`` (seconds since 1970), ``host``, ``phase``, ``epoch``, ``rank`` and ``incarnation`` (null
where the line is about the whole instance), ``cause``, ``evidence``, ``duration`` (seconds since this host
entered its previous phase; null for lines about one rank) and ``operation`` (the same for all lines of one change).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

INSTANCE_PHASES = ("FORMING", "REVOKED", "AGREED", "REPAIRED", "RUN")


@dataclass(frozen=True, slots=True)
class EventLine:
    """One line of the log."""

    time: float
    host: str
    phase: str
    epoch: int
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
        return f"{stamp} {self.host} epoch {self.epoch} {self.phase}{who}{took}: {self.cause}{seen}"


class EventLog:
    """Appends to a file. A lost line never stops a recovery: the log counts a failed write and does not raise."""

    def __init__(self, path: Path, host: str) -> None:
        self._file: IO[str] = path.open("a", buffering=1)
        self._host = host
        self._phase_since: float | None = None
        self.lost = 0
        """How many lines could not be written."""

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
        try:
            self._file.write(json.dumps(asdict(line)) + "\n")
        except OSError:
            self.lost += 1

    def close(self) -> None:
        self._file.close()


def parse_line(text: str) -> EventLine:
    """Raises ValueError, with what is wrong, for text that is not a line of an event log."""
    try:
        return EventLine(**json.loads(text))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"this is not a line of an event log: {text[:80]!r} ({error})") from error


def read_events(path: Path) -> Iterator[EventLine]:
    """The lines of a log, without a last line that is half written."""
    with path.open() as file:
        for text in file:
            if text.endswith("\n"):
                yield parse_line(text)
