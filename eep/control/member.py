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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from eep import faults, long_work
from eep.control.launch.processes import INCARNATION, RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from eep.control.pulse import Pulse, is_supported
from eep.control.wire.client import Client, SupervisorGone
from eep.control.wire.messages import (
    ControlMessage,
    Register,
    SayFailed,
    SayLeave,
    SayReady,
    SayRevoked,
    SaySettled,
    SaySuspect,
    TellRefused,
    TellRevoke,
    TellView,
)
from eep.control.wire.sealed_frames import WireError
from eep.faults import orders
from eep.view import FOREVER, View


def obey_fault_orders() -> None:
    """Take orders for faults from now on, if a supervisor started this process and the server allows them."""
    if CONTROL_DIRECTORY in os.environ:
        directory, rank, incarnation = (os.environ[name] for name in (CONTROL_DIRECTORY, RANK, INCARNATION))
        orders.obey_in(Path(directory), int(rank), int(incarnation))


class DataPlane(Protocol):
    """What a member needs of a rank's data plane. :class:`eep.control.planes.Planes` is one."""

    @property
    def control_fds(self) -> tuple[int, ...]:
        """The descriptors of the pages through which the supervisor ends this rank's waits."""

    @property
    def device_files(self) -> tuple[int, ...]:
        """The driver's files of a GPU that other ranks use too; the supervisor holds them for a while after this rank."""

    def revoke(self, epoch: int) -> None:
        """End every wait of epochs up to ``epoch``. Called from another thread, at any time."""

    def apply(self, view: View) -> bool:
        """Show ``view`` to the kernels. Returns False, soon, when that cannot be done yet; the member then tries again."""


class NoDataPlane:
    """A rank that shares no memory."""

    control_fds: tuple[int, ...] = ()
    device_files: tuple[int, ...] = ()

    def revoke(self, epoch: int) -> None:
        pass

    def apply(self, view: View) -> bool:
        return True


class Member:
    def __init__(self, client: Client, rank: int, incarnation: int, data_plane: DataPlane) -> None:
        self.rank, self.incarnation = rank, incarnation
        self._client, self._data_plane = client, data_plane
        self._news = threading.Condition()
        self._view: View | None = None
        self._running = False
        self._revoked = -1
        self._settled = -1
        self._applied: View | None = None
        self._repair = SaySettled()
        self._spoken = 0
        self._ended: str | None = None
        self._pulse = Pulse() if is_supported() else None
        if self._pulse is not None:
            long_work.tell(self._pulse.progress.advance)
        pages, pulse = data_plane.control_fds, (self._pulse.descriptor,) if self._pulse else ()
        files = data_plane.device_files
        client.send(
            Register(rank, incarnation, pages=len(pages), pulse=bool(pulse), device_files=len(files)),
            descriptors=(*pages, *pulse, *files),
        )
        self._thread = threading.Thread(target=self._listen, name="eep-member", daemon=True)
        self._thread.start()

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
        """Say that this rank has loaded everything and can take part."""
        self._say(SayReady())

    def suspect(self, ranks: Iterable[int], evidence: str) -> None:
        """Say that ``ranks`` kept this rank waiting past its deadline. No step of this epoch may be trusted."""
        suspects = tuple(ranks)
        view = self._applied
        if view is None or not suspects or not set(suspects) <= set(view.active) - {self.rank}:
            raise ValueError(f"rank {self.rank} can only suspect other ranks of its view, not {suspects}")
        self._give_up(view.epoch)
        self._say(SaySuspect(suspects, evidence[:1024]), view.epoch)

    def revoked(self) -> None:
        """Say that the step of this rank ended by a revoke, or cannot be trusted for another reason."""
        if self._applied is not None:
            self._give_up(self._applied.epoch)
            self._say(SayRevoked(), self._applied.epoch)

    def fail(self, evidence: str) -> None:
        """Say that an exception ends this rank. Its supervisor kills it at once: nothing that is to be seen may follow."""
        self._say(SayFailed(evidence[:1024]))

    def advance(self) -> None:
        """Say that this rank gets on: in long work, more often than the supervisor's policy allows it to stand still."""
        if self._pulse is not None:
            self._pulse.progress.advance()

    def run(self) -> None:
        """Say that this rank gets on, and waits for no peer and no device until it says anything else: if its thread sleeps
        meanwhile for longer than the supervisor's policy allows, it is taken to hang."""
        if self._pulse is not None:
            self._pulse.progress.run()

    def may_take_long(self, honestly: bool) -> None:
        """Say whether what this rank runs from now on may honestly compute for long, as it may until it says otherwise."""
        if self._pulse is not None:
            self._pulse.progress.may_take_long = honestly

    def may_wait_unseen(self) -> None:
        """Say that from now on this rank may wait for its device where it says that it runs."""
        if self._pulse is not None:
            self._pulse.progress.may_wait_unseen = True

    def note_repair(self, experts: int, sources: Mapping[str, int]) -> None:
        """What this rank has brought in for the view that it enters, for the supervisor's log. ``sources``: bytes of each."""
        self._repair = SaySettled(experts, dict(sources))

    def leave(self) -> None:
        """Ask to be taken out. The boundary gives None once that is done."""
        self._say(SayLeave())

    def close(self) -> None:
        self._client.close()

    # What the rank asks.

    @property
    def removed(self) -> str | None:
        """Why this process is no longer part of the instance; None while it may be."""
        return self._ended

    @property
    def newest_view(self) -> View | None:
        """What the supervisor said last; the rank may not have entered it yet."""
        return self._view

    @property
    def has_news(self) -> bool:
        """Whether the next boundary has something to do or to wait for.

        Every step asks, so this takes no lock: news of this very moment is seen at the next boundary."""
        view = self._view
        return self._ended is not None or view is None or self._settled != view.epoch or not self._is_running(view)

    def boundary(self, repair: Callable[[View], None] | None = None, *, within: float | None = None) -> View | None:
        """The view to run the next step under, or None when there is none any more.

        Waits for as long as the instance is not running; ``within`` seconds at most, if given, after which
        TimeoutError is raised.
        """
        while True:
            self.advance()  # no rest in the wait below: the supervisor expects progress only when it is over
            with self._news:
                if not self._news.wait_for(self._has_something_to_do, within):
                    raise TimeoutError(f"the instance did not run within {within} s")
                view = self._view
                if self._ended is not None or view is None:
                    return None
                if self._settled == view.epoch:
                    return view
            self._enter(view, repair)

    def wait_for_view(self, *, after: int, within: float | None = None) -> None:
        """Waits until there is a view newer than epoch ``after``, or none any more. Until then this rank has no work."""
        if self._pulse is not None:
            self._pulse.progress.rest()  # the instance may run, and this rank may have nothing to do in it
        with self._news:
            known = self._news.wait_for(
                lambda: self._ended is not None or (self._view is not None and self._view.epoch > after), within
            )
        self.advance()
        if not known:
            raise TimeoutError(f"no view followed epoch {after} within {within} s")

    def _has_something_to_do(self) -> bool:
        view = self._view
        if self._ended is not None:
            return True
        if view is None or not self._is_in(view):
            return False
        unsettled = self._settled < view.epoch
        return unsettled or self._is_running(view)

    def _is_running(self, view: View) -> bool:
        return self._running and self._revoked < view.epoch

    def _enter(self, view: View, repair: Callable[[View], None] | None) -> None:
        faults.at("view.agreed")
        if not self._data_plane.apply(view):
            return  # look for a newer view, then try again
        self._applied, self._repair = view, SaySettled()
        if repair is not None:
            repair(view)
        with self._news:
            self._settled = view.epoch
            current = self._view
        # A newer view may have come while this rank repaired; then no rank settles in this one.
        if current is view and self._ended is None:
            self._say(self._repair, view.epoch)

    def _give_up(self, epoch: int) -> None:
        """No further step of this epoch; the boundary waits for the next."""
        with self._news:
            self._revoked = max(self._revoked, epoch)

    def _is_in(self, view: View) -> bool:
        return self.rank in view.active and view.incarnations[self.rank] == self.incarnation

    def _say(self, message: ControlMessage, epoch: int = 0) -> None:
        """Send, in the epoch that the message is about. Only the rank's own thread speaks, so epochs never fall."""
        self._spoken = max(self._spoken, epoch)
        try:
            self._client.send(message, self._spoken)
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
