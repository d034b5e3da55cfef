"""A drill as a story: what was done to a server, what it did, and what its clients saw of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eep.control.watcher import Watcher
from eep.drill.faults import Target
from eep.drill.load import Load
from eep.observe.timeline import ActiveRanks, Moment, draw_timeline
from eep.view import View


@dataclass(slots=True)
class Fault:
    """One fault and what came of it, in seconds after it; None while it has not come."""

    rank: int
    kind: str
    at: float
    noticed: float | None = None
    """A view without the rank was committed."""
    running: float | None = None
    """The survivors run in it, repaired."""
    rejoined: float | None = None
    """The rank is back, and all run."""

    def __str__(self) -> str:
        parts = [("view", self.noticed), ("running again", self.running), ("rejoined", self.rejoined)]
        told = ", ".join(f"{name} {_ms(value)}" for name, value in parts if value is not None)
        return f"rank {self.rank} {self.kind}: {told or 'nothing came of it yet'}"


@dataclass
class Story:
    """Watches a server from outside while it is drilled. ``time.monotonic`` throughout."""

    directory: Path
    load: Load
    say: Callable[[str], None] = print
    started: float = field(default_factory=time.monotonic)
    faults: list[Fault] = field(default_factory=list)
    views: list[tuple[float, View, bool]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self.target = Target(self.directory)
        self._watcher = Watcher(self.directory, self._viewed, self._gone)

    def kill(self, rank: int) -> Fault:
        return self._fault(rank, "killed", self.target.kill)

    def stop(self, rank: int) -> Fault:
        return self._fault(rank, "stopped", self.target.stop)

    def wait_until_all_run(self, ranks: int, within: float = 240.0) -> bool:
        """Until that many ranks are in and run. False if that does not come."""
        with self._news:
            return self._news.wait_for(
                lambda: bool(self.views) and self.views[-1][2] and len(self.views[-1][1].active) == ranks, within
            )

    def wait_until_run(self, ranks: Iterable[int], within: float = 240.0, *, with_others: bool = False) -> bool:
        """Until just these are in and run, or these and any others. False if that does not come. A view may be over when
        this thread hears of it: it counts all the same."""
        wanted = set(ranks)
        with self._news:
            first = max(0, len(self.views) - 1)
            return self._news.wait_for(
                lambda: any(
                    runs and (wanted <= set(view.active) if with_others else wanted == set(view.active))
                    for _, view, runs in self.views[first:]
                ),
                within,
            )

    def wait_until_back(self, ranks: int, lost: Mapping[int, int], within: float = 240.0) -> bool:
        """Until that many ranks run, each of ``lost`` in a later life than that one. False if that does not come."""

        def is_so() -> bool:
            if not self.views or not self.views[-1][2]:
                return False
            view = self.views[-1][1]
            return len(view.active) == ranks and all(view.incarnations[rank] > life for rank, life in lost.items())

        with self._news:
            return self._news.wait_for(is_so, within)

    def wait_until_noticed(self, fault: Fault, within: float = 60.0) -> bool:
        with self._news:
            return self._news.wait_for(lambda: fault.running is not None, within)

    def close(self) -> None:
        self._watcher.close()

    def gap(self, fault: Fault, window: float = 10.0) -> float:
        """The longest that a client waited for a token around a fault."""
        return self.load.largest_gap(fault.at, fault.at + window)

    def summary(self) -> list[str]:
        lines = [
            f"{len(self.load.answers)} requests, {len(self.load.failed)} failed, {len(self.load.wrong)} with a wrong token",
        ]
        lines += [f"{fault}; largest gap between tokens {_ms(self.gap(fault))}" for fault in self.faults]
        return lines

    def draw(self, path: Path, title: str) -> list[Path]:
        end = time.monotonic() - self.started
        steps: list[ActiveRanks] = []
        for at, view, running in self.views:
            if running or not steps or len(view.active) < steps[-1].active:
                steps.append(ActiveRanks(max(0.0, at - self.started), len(view.active), view.epoch))
        tokens = [moment - self.started for moment in self.load.token_times()]
        return draw_timeline(path, title, tokens, steps, self.moments, end)

    def _fault(self, rank: int, kind: str, do: Callable[[int], None]) -> Fault:
        fault = Fault(rank, kind, time.monotonic())
        with self._news:
            self.faults.append(fault)
        do(rank)
        self._note(f"rank {rank} {kind}", "fault", fault.at)
        return fault

    def _viewed(self, view: View, running: bool) -> None:
        now = time.monotonic()
        with self._news:
            self.views.append((now, view, running))
            for fault in self.faults:
                is_in = fault.rank in view.active
                if fault.noticed is None and not is_in:
                    fault.noticed = now - fault.at
                if fault.noticed is not None and fault.running is None and running and not is_in:
                    fault.running = now - fault.at
                if fault.noticed is not None and fault.rejoined is None and running and is_in:
                    fault.rejoined = now - fault.at
            self._news.notify_all()
        state = "runs" if running else "is agreed on"
        self._note(f"epoch {view.epoch} {state}: ranks {', '.join(map(str, view.active))}", "view", now)

    def _gone(self, rank: int, incarnation: int, reason: str, failed: bool) -> None:
        self._note(f"rank {rank} (life {incarnation}) is gone: {reason}", "event", time.monotonic())

    def _note(self, text: str, kind: str, at: float) -> None:
        moment = Moment(at - self.started, text, kind)
        self.moments.append(moment)
        self.say(f"{moment.at:8.3f} s  {text}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
