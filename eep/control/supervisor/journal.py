"""What a supervisor writes down for people: its event log, and what it refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from eep.membership import Transition
from eep.observe.event_log import MOST_BYTES, EventLog


class Journal:
    def __init__(self, path: Path, host: str) -> None:
        self._events = EventLog(path, host, MOST_BYTES)
        self.rejected: Counter[str] = Counter()
        """How often each kind of thing was refused."""
        self.last_rejection = ""

    def transition(self, told: Transition) -> None:
        self._events.write(
            told.phase,
            told.epoch,
            told.cause,
            rank=told.rank,
            incarnation=told.incarnation,
            evidence=told.evidence,
            operation=told.operation,
        )

    def rejection(self, kind: str, epoch: int, reason: str) -> None:
        self.rejected[kind] += 1
        if reason != self.last_rejection:  # a store that stays away would fill the log with one line
            self._events.write("REJECTED", epoch, reason, operation=kind)
        self.last_rejection = reason

    def note(
        self, phase: str, epoch: int, cause: str, rank: int = -1, incarnation: int = -1, evidence: str = ""
    ) -> None:
        """A line about something that changes no membership."""
        self._events.write(phase, epoch, cause, rank=rank, incarnation=incarnation, evidence=evidence)

    def close(self) -> None:
        self._events.close()
