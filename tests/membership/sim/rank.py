"""A simulated rank process: it starts, follows views at its step boundaries, and complains about peers it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field

from eep.membership import Phase
from eep.view import View


@dataclass
class SimRank:
    rank: int
    incarnation: int
    host: str
    alive: bool = True
    paused: bool = False
    unkillable: bool = False
    leaving: bool = False
    view: View | None = None
    phase: Phase = Phase.AGREED
    revoked: int = -1
    blocked_before: tuple[int, ...] = ()
    word: int = 0
    """Its progress word."""
    progressed_at: float = 0.0
    hung: bool = False
    """Whether it was paused since it last made progress."""
    owed: list[tuple[View, Phase]] = field(default_factory=list)
    """Notices that came while the process was paused."""

    def pause(self) -> None:
        self.paused = self.hung = True

    def progress(self, now: float) -> None:
        self.word += 1
        self.progressed_at, self.hung = now, self.paused

    @property
    def running(self) -> bool:
        """Whether it would run a step now."""
        return (
            self.alive
            and not self.paused
            and self.view is not None
            and self.phase is Phase.RUN
            and self.rank in self.view.active
            and self.view.incarnations[self.rank] == self.incarnation
            and self.revoked < self.view.epoch
        )
