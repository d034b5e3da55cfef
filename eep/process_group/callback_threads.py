"""Threads in which the callbacks of futures run.

A callback may make a call of the same group and wait for it, and for the callbacks of that call in turn. So no thread that
runs calls runs callbacks, and no callback waits for a thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_IDLE_S = 30.0
"""After so long without work a thread ends."""


class CallbackThreads:
    """As many threads as callbacks run at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], object]]] = []
        """What each idle thread waits for. It takes itself off the list, or is taken off by the one who gives it work."""

    def run(self, callback: Callable[[], object]) -> None:
        """Returns at once."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
        if waiting is not None:
            waiting.put(callback)
        else:
            threading.Thread(target=self._serve, args=(callback,), name="eep-callbacks", daemon=True).start()

    def forget(self) -> None:
        """In a process that was forked: the threads stayed with its parent."""
        self._lock, self._idle = threading.Lock(), []

    def _serve(self, callback: Callable[[], object]) -> None:
        mine: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        while True:
            callback()
            with self._lock:
                self._idle.append(mine)
            try:
                callback = mine.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if mine in self._idle:
                        self._idle.remove(mine)
                        return
                callback = mine.get()  # it is on its way


callbacks = CallbackThreads()
"""Those of this process."""

os.register_at_fork(after_in_child=callbacks.forget)
