"""The registry of a rank whose peers are on several hosts: ranks of its own host hear at once, others when the store does.

A step must not wait for the store. So a thread tells the store what was published, and says it again until the store has
it. Of what this host's ranks say the directory knows more than the store, so it comes first in a scan.
"""

from __future__ import annotations

import logging
import threading
import time

from eep.errors import EepError
from eep.experts.registry.directory_registry import DirectoryRegistry, Registry

logger = logging.getLogger(__name__)
_AGAIN_AFTER_S = 0.5
_ENDS_WITHIN_S = 2.0


class DeferringRegistry:
    """``near`` is of this host, and ``far`` of all. Both stay open when this one is closed."""

    def __init__(self, near: DirectoryRegistry, far: Registry) -> None:
        self._near, self._far = near, far
        self._waiting: dict[str, bytes | None] = {}
        """What the store has yet to hear; None for a record that is withdrawn."""
        self._changed = threading.Condition()
        self._mine: set[str] = set()
        self._is_closed = False
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="eep-deferring-registry", daemon=True)
        self._thread.start()

    def publish(self, key: str, value: bytes) -> None:
        """Returns at once, also while the store does not answer."""
        self._near.publish(key, value)
        with self._changed:
            self._mine.add(key)
            self._wait_with(key, value)

    def withdraw(self, key: str) -> None:
        self._near.withdraw(key)
        with self._changed:
            if key in self._mine:
                self._mine.discard(key)
                self._wait_with(key, None)

    def scan(self, prefix: str) -> dict[str, bytes]:
        return {**self._far.scan(prefix), **self._near.scan(prefix)}

    def flush(self, within: float) -> bool:
        """Whether the store has heard everything, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, within)

    def close(self) -> None:
        """Withdraw everything that this object published. What the store does not hear in time ends with its lease."""
        for key in list(self._mine):
            self.withdraw(key)
        self.flush(_ENDS_WITHIN_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_ENDS_WITHIN_S)

    def _wait_with(self, key: str, value: bytes | None) -> None:
        self._waiting[key] = value
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if self._is_closed:
                    return
                key, value = next(iter(self._waiting.items()))
            if self._say(key, value):
                with self._changed:
                    if self._waiting.get(key) is value:
                        del self._waiting[key]
                    self._changed.notify_all()
            else:
                time.sleep(_AGAIN_AFTER_S)

    def _say(self, key: str, value: bytes | None) -> bool:
        try:
            if value is None:
                self._far.withdraw(key)
            else:
                self._far.publish(key, value)
        except (EepError, OSError) as error:
            if str(error) != self._told:
                logger.warning("what this rank holds is not known to others yet, and is said again: %s", error)
            self._told = str(error)
            return False
        self._told = ""
        return True
