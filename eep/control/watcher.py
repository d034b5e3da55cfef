"""A watcher: a process that is no rank but must know which ranks are in, such as a server's front end.

It hears every view as it is committed and every lost life at once, over the supervisor's authenticated socket.
Callbacks run in the watcher's thread, one at a time, in the order of what happened. When the connection is
lost, the watcher connects again; the first view then tells what it missed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from eep.control.wire.client import Client
from eep.control.wire.messages import SayMoved, TellGone, TellView, Watch
from eep.control.wire.sealed_frames import WireError
from eep.view import View

TRIES_EVERY = 0.2


class Watcher:
    """``on_view(view, running)``: the committed view, and whether its ranks run (or still repair).

    ``on_gone(rank, incarnation, reason, failed)``: that life of a rank is over; the view without it follows. ``failed``: an
    exception in the rank itself ended it. ``on_lost``: the supervisor does not answer; the watcher tries again until
    :meth:`close`.
    """

    def __init__(
        self,
        directory: Path,
        on_view: Callable[[View, bool], None],
        on_gone: Callable[[int, int, str, bool], None],
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._directory, self._on_view, self._on_gone = directory, on_view, on_gone
        self._on_lost = on_lost or (lambda reason: None)
        self._last: tuple[View, bool] | None = None
        self._ending = threading.Event()
        self._client: Client | None = None
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="eep-watcher", daemon=True)
        self._thread.start()

    def say_moved(self, rank: int, incarnation: int, requests: int) -> None:
        """Tell the supervisor that requests of that life of a rank go on elsewhere, for its log, if it answers."""
        with self._guard:
            client = self._client
        if client is not None:
            with suppress(OSError):
                client.send(SayMoved(rank, incarnation, requests))

    def close(self) -> None:
        """No callback runs after this returns, unless it is called from one."""
        self._ending.set()
        with self._guard:
            if self._client is not None:
                self._client.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ending.is_set():
            try:
                self._listen(Client(self._directory))
            except (OSError, WireError, ValueError) as error:
                if not self._ending.is_set():
                    self._on_lost(str(error))
            self._ending.wait(TRIES_EVERY)

    def _listen(self, client: Client) -> None:
        with self._guard:
            self._client = client
        self._last = None
        try:
            client.send(Watch())
            while not self._ending.is_set():
                received = client.receive()
                match received.message:
                    case _ if self._ending.is_set():
                        return
                    case TellView(active=active, incarnations=incarnations, phase=phase):
                        self._heard(View(received.epoch, active, incarnations), phase == "run")
                    case TellGone(rank=rank, incarnation=incarnation, reason=reason, failed=failed):
                        self._on_gone(rank, incarnation, reason, failed)
        finally:
            with self._guard:
                self._client = None
            client.close()

    def _heard(self, view: View, running: bool) -> None:
        if self._last != (view, running):  # the record changes for other reasons too
            self._last = view, running
            self._on_view(view, running)
