"""Where ranks, watchers and operators speak to a supervisor, over a Unix socket of mode 0600.

The front desk knows which rank speaks; the core says what it means. A message that does not verify ends its
connection and is counted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from eep.access import peer_credentials
from eep.control.pulse import PulseWatch
from eep.control.supervisor.held_files import HeldFiles
from eep.control.wire.connection import Connection
from eep.control.wire.listener import ConnectionListener
from eep.control.wire.messages import (
    AskEvidence,
    AskOperation,
    AskStatus,
    ControlMessage,
    FromPeer,
    Register,
    SayFailed,
    SayLeave,
    SayMoved,
    SayReady,
    SayRevoked,
    SaySettled,
    SaySuspect,
    TellAnswer,
    TellGone,
    TellRefused,
    TellRevoke,
    TellView,
    Watch,
)
from eep.control.wire.sealed_frames import ReceivedMessage
from eep.membership import Event, Failed, Leave, PulseStopped, RankGone, Ready, RevokeSeen, Settled, Suspected
from eep.observe.change_summary import ChangeReport, MovedTold, RepairTold
from eep.view import FOREVER

MAX_CONNECTIONS = 4096


class RevocablePage(Protocol):
    """The page of a rank's data plane that ends its waits."""

    def revoke(self, epoch: int) -> None: ...

    def close(self) -> None: ...


def open_shared_page(descriptor: int) -> RevocablePage:
    """The data plane's control page behind a descriptor. Loaded when the first rank brings one."""
    from eep.data_plane.control_page import SharedControlPage

    return SharedControlPage(descriptor)


class DeskOwner(Protocol):
    """What the front desk asks of its supervisor."""

    def feed(self, event: Event) -> None: ...

    def reject(self, kind: str, reason: str) -> None: ...

    def why_not_registered(self, rank: int, incarnation: int) -> str | None: ...

    def standing(self) -> tuple[int, ControlMessage | None]:
        """The epoch, and what to tell a rank that has just registered."""

    def status(self) -> str: ...

    def operate(self, request: AskOperation | AskEvidence) -> TellAnswer:
        """What came of it: done, asked for before, or why not."""


class FrontDesk:
    def __init__(self, path: Path, key: bytes, owner: DeskOwner, open_page: Callable[[int], RevocablePage]) -> None:
        self._path, self._key, self._owner, self._open_page = path, key, owner, open_page
        self._connections: set[Connection] = set()
        self._members: dict[int, tuple[int, Connection]] = {}
        self._who: dict[Connection, tuple[int, int]] = {}
        self._pages: dict[int, list[RevocablePage]] = {}
        self._pulses: dict[int, PulseWatch] = {}
        self._held_files = HeldFiles()
        self._watchers: set[Connection] = set()
        self._listener: ConnectionListener | None = None
        self.report_watchers: list[Callable[[ChangeReport], None]] = []

    @property
    def registered(self) -> dict[int, int]:
        """The incarnation of every rank that is connected."""
        return {rank: incarnation for rank, (incarnation, _) in self._members.items()}

    def listen(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._path.unlink(missing_ok=True)
        os.fchmod(sock.fileno(), 0o600)  # before it has a name; the umask is not ours alone to change
        sock.bind(str(self._path))
        sock.listen(256)
        self._listener = ConnectionListener(
            sock,
            self._took,
            lambda error: self._owner.reject("not-accepted", f"a connection could not be accepted: {error}"),
        )

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            with suppress(OSError):  # it is gone, or the disk is read-only
                self._path.unlink()
        for connection in list(self._connections):
            connection.close()
        for rank in {*self._pages, *self._pulses}:
            self.forget(rank)
        await self._held_files.close()

    def revoke(self, epoch: int, reason: str) -> None:
        """End the waits of every rank: first through the pages, at once, then by message."""
        for pages in self._pages.values():
            for page in pages:
                page.revoke(epoch)
        self.tell(TellRevoke(reason[:1024]), epoch)

    def tell(self, message: ControlMessage, epoch: int) -> None:
        for _, connection in list(self._members.values()):
            connection.send(message, epoch)
        if isinstance(message, TellView):
            for connection in list(self._watchers):
                connection.send(message, epoch)

    def tell_gone(self, gone: RankGone, epoch: int) -> None:
        """Tell every watcher that a life of a rank is over."""
        for connection in list(self._watchers):
            connection.send(TellGone(gone.rank, gone.incarnation, gone.cause[:1024], gone.failed), epoch)

    def end_waits(self, rank: int, incarnation: int) -> None:
        """End the waits of one life of a rank, in every epoch. Its kernels may run on after its process is killed. One that
        waits would still do so when the driver takes its memory away."""
        registered, _ = self._members.get(rank, (incarnation, None))
        for page in self._pages.get(rank, ()) if registered == incarnation else ():
            page.revoke(FOREVER)

    def progress_of(self, rank: int) -> int | None:
        """What the progress word of a rank says; None if it need not advance, or the rank has none."""
        pulse = self._pulses.get(rank)
        return None if pulse is None else pulse.progress.read()

    def run_word_of(self, rank: int) -> tuple[int, int] | None:
        """The same, and its thread, while the rank waits for no peer and no device; None otherwise."""
        pulse = self._pulses.get(rank)
        return None if pulse is None else pulse.progress.read_run()

    def forget(self, rank: int) -> None:
        """The process of a rank has ended."""
        self._held_files.ended(rank)
        for page in self._pages.pop(rank, ()):
            page.revoke(FOREVER)
            page.close()
        pulse = self._pulses.pop(rank, None)
        if pulse is not None:
            pulse.close()
        member = self._members.pop(rank, None)
        if member is not None:
            member[1].close()

    def _took(self, sock: socket.socket) -> None:
        peer = peer_credentials(sock)
        if not peer.is_same_user or len(self._connections) >= MAX_CONNECTIONS:
            self._owner.reject(
                "unwelcome",
                f"a connection of user {peer.uid} was refused; {len(self._connections)} connections are open",
            )
            sock.close()
            return
        connection = Connection(sock, self._key, FromPeer, received=self._received, closed=self._closed)
        self._connections.add(connection)

    def _closed(self, connection: Connection, kind: str, reason: str) -> None:
        self._connections.discard(connection)
        self._watchers.discard(connection)
        who = self._who.pop(connection, None)
        if who is not None and self._members.get(who[0], (0, None))[1] is connection:
            del self._members[who[0]]
        if kind:
            self._owner.reject(kind, f"{f'rank {who[0]}' if who else 'a stranger'}: {reason}")

    def _received(self, connection: Connection, received: ReceivedMessage[Any]) -> None:
        match received.message:
            case Register():
                self._register(connection, received.message)
            case Watch():
                self._watchers.add(connection)
                epoch, standing = self._owner.standing()
                if standing is not None:
                    connection.send(standing, epoch)
            case SayMoved(rank=rank, incarnation=incarnation, requests=requests) if connection in self._watchers:
                self._tell_of(MovedTold(rank, incarnation, requests))
            case AskStatus():
                connection.send(TellAnswer(True, self._owner.status()), self._owner.standing()[0])
            case AskOperation() | AskEvidence():
                answer = self._owner.operate(received.message)
                connection.send(answer, self._owner.standing()[0])
            case _:
                self._said(connection, received)

    def _tell_of(self, report: ChangeReport) -> None:
        for watcher in self.report_watchers:
            watcher(report)

    def _register(self, connection: Connection, message: Register) -> None:
        refusal = self._owner.why_not_registered(message.rank, message.incarnation)
        if refusal is None and (message.rank in self._members or connection in self._who):
            refusal = f"rank {message.rank} is registered already; a rank connects once"
        if refusal is None:
            refusal = self._take_descriptors(connection, message)
        epoch, standing = self._owner.standing()
        if refusal is not None:
            self._owner.reject("registration", refusal)
            connection.send(TellRefused(refusal[:1024]), epoch)
            return
        self._members[message.rank] = (message.incarnation, connection)
        self._who[connection] = (message.rank, message.incarnation)
        if standing is not None:
            connection.send(standing, epoch)

    def _take_descriptors(self, connection: Connection, message: Register) -> str | None:
        """A rank without a page hears of revokes by message only. Without a pulse, only its pidfd shows its death."""
        announced = message.pages + message.pulse + message.device_files
        descriptors = [descriptor for _ in range(announced) if (descriptor := connection.take_descriptor()) is not None]
        self._held_files.hold(message.rank, descriptors[message.pages + message.pulse :])
        if len(descriptors) < announced:
            return f"rank {message.rank} announced descriptors that did not come with its registration"
        stopped = PulseStopped(message.rank, message.incarnation)
        try:
            for descriptor in descriptors[: message.pages]:
                self._pages.setdefault(message.rank, []).append(self._open_page(descriptor))
            if message.pulse:
                self._pulses[message.rank] = PulseWatch(descriptors[message.pages], lambda: self._owner.feed(stopped))
        except (ValueError, OSError, RuntimeError) as error:
            return f"rank {message.rank} sent a descriptor that is no control page or no pulse: {error}"
        return None

    def _said(self, connection: Connection, received: ReceivedMessage[Any]) -> None:
        who = self._who.get(connection)
        if who is None:
            connection.close("unregistered", f"{type(received.message).__name__} before Register")
            return
        event: Event
        match received.message:
            case SayReady():
                event = Ready(*who)
            case SaySettled(experts=experts, sources=sources):
                self._tell_of(RepairTold(who[0], received.epoch, experts, sources))
                event = Settled(*who, received.epoch)
            case SaySuspect(suspects=suspects, evidence=evidence):
                event = Suspected(*who, received.epoch, suspects, evidence)
            case SayRevoked():
                event = RevokeSeen(*who, received.epoch)
            case SayFailed(evidence=evidence):
                event = Failed(*who, evidence)
            case SayLeave():
                event = Leave(*who)
            case other:
                raise AssertionError(f"the schema lets {other} in, but no case here handles it")
        self._owner.feed(event)
