"""The order in which the queued calls of a group run. It is the same on every rank, although ranks come to the callbacks of
a call at different times.

Calls that the callbacks of a call make run right after it, before whatever was queued behind it, and so on for the callbacks
of theirs. So what follows a call waits until its callbacks have returned.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eep.errors import EepError
from eep.process_group.call import Call
from eep.process_group.callback_threads import callbacks
from eep.process_group.work import EepWork

_LOOKS_EVERY_S = 1.0
"""How often it is seen whether what waits for callbacks has waited too long."""


@dataclass(slots=True, eq=False)
class QueuedCall:
    batch: list[Call]
    timeout: float
    work: EepWork
    epoch: int
    """Of the view to which it belongs."""
    since: float = field(default_factory=time.monotonic)
    levels: Mapping[CallQueue, _Level] = field(default_factory=dict)
    """In which callbacks it was made."""


class _Level:
    """The calls that were made at one place: in the callbacks of one call, or outside of any."""

    def __init__(self, outer: _Level | None) -> None:
        self.outer, self.over = outer, False
        self.calls: queue.SimpleQueue[QueuedCall | None] = queue.SimpleQueue()


class _CallbackPlace(threading.local):
    """In which callbacks a thread is, if it is in any."""

    levels: Mapping[CallQueue, _Level] = {}


_place = _CallbackPlace()


class CallQueue:
    """Served by one thread. Any thread puts calls into it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards what follows, and keeps a call from being put behind the end, where it would not be served."""
        self._outermost = _Level(None)
        self._waiting: list[QueuedCall] = []
        self.unfinished = 0
        """How many calls have not run, or have callbacks that have not returned."""
        self._closed = False

    def put(self, call: QueuedCall) -> None:
        """EepError if the queue was closed."""
        call.levels = _place.levels
        call.work.follow = lambda follow: self._run_callbacks(call, follow)
        with self._lock:
            if self._closed:
                raise EepError(f"{call.work.name}: this process group was destroyed")
            level = call.levels.get(self, self._outermost)
            while level.over and level.outer is not None:  # callbacks that did not wait for what they began
                level = level.outer
            self.unfinished += 1
            self._waiting.append(call)
            level.calls.put(call)

    def close(self) -> None:
        """What is queued is still served."""
        with self._lock:
            self._closed = True
            self._outermost.calls.put(None)

    def serve(self, run: Callable[[QueuedCall], None]) -> None:
        """Runs the calls, until the queue is closed and empty. ``run`` ends the work of the call that it is given."""
        self._run = run
        self._serve(self._outermost)

    def _serve(self, level: _Level) -> None:
        while (call := self._next(level)) is not None:
            with self._lock:
                self._waiting.remove(call)
            if not call.work.is_completed():  # else it has waited too long
                self._run(call)
            with self._lock:
                self.unfinished -= 1

    def _next(self, level: _Level) -> QueuedCall | None:
        if level.outer is None:
            return level.calls.get()
        since = time.monotonic()
        while True:
            try:
                return level.calls.get(timeout=_LOOKS_EVERY_S)
            except queue.Empty:
                self._give_up(since)

    def _run_callbacks(self, call: QueuedCall, follow: Callable[[], object]) -> None:
        """In a thread of their own, while this one serves the calls that they make."""
        outer = call.levels.get(self, self._outermost)
        level = _Level(outer)

        def run() -> None:
            _place.levels = {**call.levels, self: level}
            try:
                follow()
            finally:
                del _place.levels
                with self._lock:
                    level.over = True
                    level.calls.put(None)

        callbacks.run(run)
        self._serve(level)

    def _give_up(self, since: float) -> None:
        """Ends what has waited too long for callbacks that have done nothing since then."""
        now = time.monotonic()
        with self._lock:
            late = [call for call in self._waiting if now - max(since, call.since) >= call.timeout]
        for call in late:
            call.work.follow = callbacks.run
            call.work.end(
                error=EepError(
                    f"{call.work.name} has waited {call.timeout:g} s for the callbacks of an earlier call, which neither "
                    "return nor make a call; a callback must not wait for what is called later outside of it"
                )
            )
