"""Who watches the peers where there is no supervisor: a thread that waits for the end of their processes.

The end of a process is an event of the kernel, known at once and never by asking around. It is evidence: what to make of
it is up to the caller.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping

Life = tuple[int, int]
"""A rank and its incarnation."""


class PeerWatch:
    """Calls ``ended(life)``, in its own thread, once for each followed process that is gone."""

    def __init__(self, ended: Callable[[Life], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._followed: dict[Life, int] = {}  # our own copy of a pidfd
        self._let_go: list[int] = []
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eep-peer-watch", daemon=True)
        self._thread.start()

    def follow(self, processes: Mapping[Life, int]) -> None:
        """From now on follows these (life: pidfd), and no others. The descriptors stay the caller's."""
        with self._lock:
            self._let_go += self._followed.values()
            self._followed = {life: os.dup(process) for life, process in processes.items()}
        os.eventfd_write(self._news, 1)

    def close(self) -> None:
        self._closed = True
        os.eventfd_write(self._news, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            for descriptor in (*self._let_go, *self._followed.values(), self._news):
                os.close(descriptor)
            self._let_go, self._followed = [], {}

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                # Only this thread polls, so that only it knows when a descriptor is not polled any more.
                for descriptor in self._let_go:
                    os.close(descriptor)
                self._let_go = []
                lives = {descriptor: life for life, descriptor in self._followed.items()}
            poller = select.poll()
            for descriptor in (self._news, *lives):
                poller.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._news in ready:
                os.eventfd_read(self._news)
            for descriptor in ready:
                if descriptor in lives and not self._closed:
                    self._forget(lives[descriptor], descriptor)

    def _forget(self, life: Life, descriptor: int) -> None:
        with self._lock:
            if self._followed.get(life) != descriptor:
                return  # the view has changed meanwhile
            del self._followed[life]
            self._let_go.append(descriptor)
        self._ended(life)
