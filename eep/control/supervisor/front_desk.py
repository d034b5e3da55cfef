"""Where a supervisor is spoken to: ranks, watchers and operators connect here, over a Unix socket of mode 0600.

The front knows who speaks; what it means is for the core to say. Whatever does not verify ends its
connection and is counted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from eep.access import peer_credentials
from eep.control.pulse import PulseWatch
from eep.control.wire.connection import Connection
from eep.control.wire.listener import Accepting
from eep.control.wire.messages import (
    Answer,
    AskOperation,
    AskStatus,
    FromPeer,
    Message,
    Register,
    SayLeave,
    SayReady,
    SayRevoked,
    SaySettled,
    SaySuspect,
    TellGone,
    TellRefused,
    TellRevoke,
    TellView,
    Watch,
)
from eep.control.wire.sealed_frames import Received
from eep.membership import Event, Leave, PulseStopped, Ready, RevokeSeen, Settled, Suspected

MAX_CONNECTIONS = 4096


class ControlPage(Protocol):
    """The page of a rank's data plane that ends its waits."""

    def revoke(self, epoch: int) -> None: ...

    def close(self) -> None: ...


class Desk(Protocol):
    """What the front asks of its supervisor."""

    def feed(self, event: Event) -> None: ...

    def reject(self, kind: str, reason: str) -> None: ...

    def why_not_registered(self, rank: int, incarnation: int) -> str | None: ...

    def standing(self) -> tuple[int, Message | None]:
        """The epoch, and what to tell a rank that has just registered."""

    def status(self) -> str: ...

    def operate(self, request: AskOperation) -> str | None:
        """None when done; otherwise why not."""


class Front:
    def __init__(self, path: Path, key: bytes, desk: Desk, open_page: Callable[[int], ControlPage]) -> None:
        self._path, self._key, self._desk, self._open_page = path, key, desk, open_page
        self._connections: set[Connection] = set()
        self._members: dict[int, tuple[int, Connection]] = {}
        self._who: dict[Connection, tuple[int, int]] = {}
        self._pages: dict[int, ControlPage] = {}
        self._pulses: dict[int, PulseWatch] = {}
        self._watchers: set[Connection] = set()
        self._gone: dict[int, int] = {}
        """The last incarnation of each rank that watchers were told is gone."""
        self._accepting: Accepting | None = None

    @property
    def registered(self) -> dict[int, int]:
        """The incarnation of every rank that is connected."""
        return {rank: incarnation for rank, (incarnation, _) in self._members.items()}

    def listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), 0o600)  # before it has a name; the umask is not ours alone to change
        listener.bind(str(self._path))
        listener.listen(256)
        self._accepting = Accepting(
            listener, self._took, lambda error: self._desk.reject("not-accepted", f"a connection: {error}")
        )

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.close()
            self._path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()
        for rank in {*self._pages, *self._pulses}:
            self.forget(rank)

    def revoke(self, epoch: int, reason: str) -> None:
        """End the waits of every rank: first through their pages, at once, and then by word."""
        for page in self._pages.values():
            page.revoke(epoch)
        self.tell(TellRevoke(reason[:1024]), epoch)

    def tell(self, message: Message, epoch: int) -> None:
        for _, connection in list(self._members.values()):
            connection.send(message, epoch)
        if isinstance(message, TellView):
            for connection in list(self._watchers):
                connection.send(message, epoch)

    def tell_gone(self, rank: int, incarnation: int, reason: str, epoch: int) -> None:
        """Watchers hear of each lost life once, when the first sign of its end is seen."""
        if self._gone.get(rank, -1) < incarnation:
            self._gone[rank] = incarnation
            for connection in list(self._watchers):
                connection.send(TellGone(rank, incarnation, reason[:1024]), epoch)

    def forget(self, rank: int) -> None:
        """The process of a rank has ended."""
        for held in (self._pages.pop(rank, None), self._pulses.pop(rank, None)):
            if held is not None:
                held.close()
        member = self._members.pop(rank, None)
        if member is not None:
            member[1].close()

    def _took(self, sock: socket.socket) -> None:
        peer = peer_credentials(sock)
        if not peer.is_same_user or len(self._connections) >= MAX_CONNECTIONS:
            self._desk.reject(
                "unwelcome", f"a connection of user {peer.uid} was refused, {len(self._connections)} are open"
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
            self._desk.reject(kind, f"{f'rank {who[0]}' if who else 'a stranger'}: {reason}")

    def _received(self, connection: Connection, received: Received[Any]) -> None:
        match received.message:
            case Register():
                self._register(connection, received.message)
            case Watch():
                self._watchers.add(connection)
                epoch, standing = self._desk.standing()
                if standing is not None:
                    connection.send(standing, epoch)
            case AskStatus():
                connection.send(Answer(True, self._desk.status()), self._desk.standing()[0])
            case AskOperation():
                refusal = self._desk.operate(received.message)
                connection.send(Answer(refusal is None, refusal or "done"), self._desk.standing()[0])
            case _:
                self._said(connection, received)

    def _register(self, connection: Connection, message: Register) -> None:
        refusal = self._desk.why_not_registered(message.rank, message.incarnation)
        if refusal is None and (message.rank in self._members or connection in self._who):
            refusal = f"rank {message.rank} is registered already; a rank connects once"
        if refusal is None:
            refusal = self._take_descriptors(connection, message)
        epoch, standing = self._desk.standing()
        if refusal is not None:
            self._desk.reject("registration", refusal)
            connection.send(TellRefused(refusal[:1024]), epoch)
            return
        self._members[message.rank] = (message.incarnation, connection)
        self._who[connection] = (message.rank, message.incarnation)
        if standing is not None:
            connection.send(standing, epoch)

    def _take_descriptors(self, connection: Connection, message: Register) -> str | None:
        """A rank without a page hears of revokes by word alone; one without a pulse is seen to die by its pidfd."""
        descriptors = [connection.take_descriptor() for announced in (message.page, message.pulse) if announced]
        if None in descriptors:
            return f"rank {message.rank} announced descriptors that did not come with its registration"
        stopped = PulseStopped(message.rank, message.incarnation)
        try:
            if message.page:
                self._pages[message.rank] = self._open_page(descriptors[0] or 0)
            if message.pulse:
                self._pulses[message.rank] = PulseWatch(descriptors[-1] or 0, lambda: self._desk.feed(stopped))
        except (ValueError, OSError, RuntimeError) as error:
            return f"what rank {message.rank} sent is no control page or no pulse: {error}"
        return None

    def _said(self, connection: Connection, received: Received[Any]) -> None:
        who = self._who.get(connection)
        if who is None:
            connection.close("unregistered", f"{type(received.message).__name__} before Register")
            return
        event: Event
        match received.message:
            case SayReady():
                event = Ready(*who)
            case SaySettled():
                event = Settled(*who, received.epoch)
            case SaySuspect(suspects=suspects, evidence=evidence):
                event = Suspected(*who, received.epoch, suspects, evidence)
            case SayRevoked():
                event = RevokeSeen(*who, received.epoch)
            case SayLeave():
                event = Leave(*who)
            case other:
                raise AssertionError(f"the schema lets {other} in but nobody handles it")
        self._desk.feed(event)
