"""The gate between calls and views: calls pass together, a view passes alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from eep.errors import EepError


class Gate:
    """Calls go through with :meth:`passing`; :meth:`alone` first makes those inside leave, then keeps all out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._lock:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._shut:
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, make_leave: Callable[[], None], within: float = 60.0) -> Iterator[None]:
        """``make_leave`` ends the waits of those inside; they must be out ``within`` seconds."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
        try:
            make_leave()
            with self._changed:
                if not self._changed.wait_for(lambda: self._inside == 0, within):
                    raise EepError(
                        f"{self._inside} calls of this process did not end within {within:.0f} s, so the view was not entered"
                    )
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()
