"""The member: a rank's side of the control plane.

A rank connects, says when it is ready, and then asks at every step boundary what to do::

    member = Member.connect(data_plane)
    member.ready()
    while (view := member.boundary(repair)) is not None:
        run one step under ``view``; if it failed, member.suspect(...) and do not commit it

:meth:`Member.boundary` returns at once while nothing has changed. When a new view was committed it applies
it, calls ``repair``, says that this rank has settled, and waits until all have. So every rank enters an
epoch at the same place: its first step under the new view. When this rank was removed, or its supervisor is
gone, the data plane is revoked for good at that moment, by the thread that heard of it, and the next
boundary gives None.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from eep.control.client import Client, SupervisorGone
from eep.control.messages import (
    Register,
    SayLeave,
    SayReady,
    SayRevoked,
    SaySettled,
    SaySuspect,
    TellRefused,
    TellRevoke,
    TellView,
)
from eep.control.private import CONTROL_DIRECTORY
from eep.control.wire import WireError
from eep.view import View

FOREVER = 2**62
"""Revoking this epoch revokes every epoch there will ever be."""


class DataPlane(Protocol):
    """What a member needs of a rank's data plane; a :class:`eep.Buffer` behind an adapter, or nothing in
    tests.
    """

    @property
    def control_fd(self) -> int | None: ...

    def revoke(self, epoch: int) -> None: ...

    def apply(self, view: View) -> None: ...


class NoDataPlane:
    """A rank that shares no memory."""

    control_fd = None

    def revoke(self, epoch: int) -> None:
        pass

    def apply(self, view: View) -> None:
        pass


class Member:
    def __init__(self, client: Client, rank: int, incarnation: int, data_plane: DataPlane) -> None:
        self.rank, self.incarnation = rank, incarnation
        self._client, self._data_plane = client, data_plane
        self._news = threading.Condition()
        self._view: View | None = None
        self._running = False
        self._revoked = -1
        self._settled = -1
        self._ended: str | None = None
        descriptor = data_plane.control_fd
        client.send(Register(rank, incarnation), descriptors=() if descriptor is None else (descriptor,))
        self._listener = threading.Thread(target=self._listen, name="eep-member", daemon=True)
        self._listener.start()

    @classmethod
    def connect(cls, data_plane: DataPlane | None = None) -> Member:
        """Register with the supervisor that started this process."""
        try:
            directory = Path(os.environ[CONTROL_DIRECTORY])
            rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
        except (KeyError, ValueError) as error:
            raise RuntimeError(
                f"this process was not started by a supervisor ({error}); a rank finds it through "
                f"{CONTROL_DIRECTORY}, EEP_RANK and EEP_INCARNATION"
            ) from error
        return cls(Client(directory), rank, incarnation, data_plane or NoDataPlane())

    # What the rank says.

    def ready(self) -> None:
        """Everything is loaded; let me in."""
        self._say(SayReady())

    def suspect(self, ranks: Iterable[int], evidence: str) -> None:
        """These kept me waiting past the deadline; my step is not to be trusted."""
        self._say(SaySuspect(tuple(ranks), evidence[:1024]))

    def revoked(self) -> None:
        """My step ended because its epoch was revoked, or I could not trust it."""
        self._say(SayRevoked())

    def leave(self) -> None:
        """Take me out. The boundary gives None once it is done."""
        self._say(SayLeave())

    def close(self) -> None:
        self._client.close()

    # What the rank asks.

    @property
    def epoch(self) -> int:
        """The epoch of the last view that was heard of."""
        return self._view.epoch if self._view else 0

    @property
    def removed(self) -> str | None:
        """Why this process is no longer part of the instance; None while it may be."""
        return self._ended

    def boundary(self, repair: Callable[[View], None] | None = None, *, within: float | None = None) -> View | None:
        """The view to run the next step under, or None when there is none any more.

        Waits for as long as the instance is not running; ``within`` seconds at most, if given, after which
        TimeoutError is raised.
        """
        while True:
            with self._news:
                if not self._news.wait_for(self._has_something_to_do, within):
                    raise TimeoutError(f"the instance did not run within {within} s")
                view = self._view
                if self._ended is not None or view is None:
                    return None
                if self._settled == view.epoch:
                    return view
            self._settle(view, repair)

    def _has_something_to_do(self) -> bool:
        view = self._view
        if self._ended is not None:
            return True
        if view is None or not self._is_in(view):
            return False
        unsettled = self._settled < view.epoch
        return unsettled or (self._running and self._revoked < view.epoch)

    def _settle(self, view: View, repair: Callable[[View], None] | None) -> None:
        self._data_plane.apply(view)
        if repair is not None:
            repair(view)
        with self._news:
            self._settled = view.epoch
            current = self._view
        # A newer view may have come while we repaired; then this one is settled by nobody.
        if current is view and self._ended is None:
            self._say(SaySettled(), view.epoch)

    def _is_in(self, view: View) -> bool:
        return self.rank in view.active and view.incarnations[self.rank] == self.incarnation

    def _say(
        self, message: SayReady | SaySettled | SaySuspect | SayRevoked | SayLeave, epoch: int | None = None
    ) -> None:
        try:
            with self._news:
                # Under the lock, so that epochs never fall on the wire.
                self._client.send(message, self.epoch if epoch is None else max(epoch, 0))
        except SupervisorGone as error:
            self._end(str(error))

    # What the supervisor says.

    def _listen(self) -> None:
        try:
            while self._ended is None:
                received = self._client.receive()
                match received.message:
                    case TellView(active=active, incarnations=incarnations, phase=phase):
                        self._heard(View(received.epoch, active, incarnations), phase == "run")
                    case TellRevoke():
                        self._heard_revoke(received.epoch)
                    case TellRefused(reason=reason):
                        self._end(reason)
        except (SupervisorGone, WireError, ValueError) as error:
            self._end(str(error))

    def _heard(self, view: View, running: bool) -> None:
        if not self._is_in(view) and view.incarnations[self.rank] >= self.incarnation:
            self._end(f"rank {self.rank} (incarnation {self.incarnation}) is not in epoch {view.epoch}")
            return
        with self._news:
            same = self._view is not None and self._view == view
            self._view = self._view if same else view
            self._running = running
            self._news.notify_all()

    def _heard_revoke(self, epoch: int) -> None:
        self._data_plane.revoke(epoch)
        with self._news:
            self._revoked = max(self._revoked, epoch)

    def _end(self, reason: str) -> None:
        """Out, for good: nothing of this process may touch shared memory from here on."""
        self._data_plane.revoke(FOREVER)
        with self._news:
            self._ended = self._ended or reason
            self._news.notify_all()
