"""The host links of one supervisor: it listens at one address, dials some supervisors, and is dialed by the others.

Of two supervisors, the one whose ident comes first dials. Who is dialed, and who may speak here, is what the records in the
store say. A connection that does not greet as one of these is closed. The kernel ends a connection whose other end has not
confirmed what was sent for the host timeout (``TCP_USER_TIMEOUT``).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from eep.control.links.host_link import HostLink
from eep.control.links.host_records import HostRecord
from eep.control.links.link_messages import FromHost, HostGreeting
from eep.control.wire.connection import Connection
from eep.control.wire.listener import ConnectionListener
from eep.control.wire.sealed_frames import ReceivedMessage, SessionEnd
from eep.membership import News

MOST_STRANGERS = 64
"""Connections that have not greeted yet."""
_REDIALS = 5
"""How often a host is dialed in the host timeout."""


class HostLinks:
    def __init__(
        self,
        ident: str,
        key: bytes,
        listening: socket.socket,
        *,
        timeout: float,
        heartbeat: float,
        heard: Callable[[News], None],
        reject: Callable[[str, str], None],
    ) -> None:
        """``listening`` is bound to the address of this host. ``heard`` gets the news of other hosts."""
        self._ident, self._key, self._timeout, self._heartbeat = ident, key, timeout, heartbeat
        self._heard, self._reject = heard, reject
        self._loop = asyncio.get_running_loop()
        self._address = str(listening.getsockname()[0])
        self.links: dict[str, HostLink] = {}
        """By the ident of the other supervisor."""
        self._dialing: dict[str, asyncio.Task[None]] = {}
        self._of: dict[Connection, str] = {}
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._news = News(ident)
        self._listener = ConnectionListener(listening, self._took, self._not_taken)
        self._beating = self._loop.create_task(self._keep_beating())

    def follow(self, records: Mapping[str, HostRecord]) -> None:
        """These are the other supervisors from now on."""
        for ident in [ident for ident, link in self.links.items() if records.get(ident) != link.record]:
            self._drop(ident)
        for ident, record in records.items():
            if ident not in self.links:
                self.links[ident] = HostLink(record, self._loop.time, self._heard)
                if self._ident < ident:
                    self._dialing[ident] = self._loop.create_task(self._keep_dialing(record))

    def reset(self) -> None:
        """Forget what was heard, and begin anew: the others may have dropped us."""
        records = {ident: link.record for ident, link in self.links.items()}
        self.follow({})
        self.follow(records)

    def tell(self, news: News) -> None:
        """Tell all others, and those that are linked later."""
        self._news = news
        for link in self.links.values():
            link.tell(news)

    async def stop(self) -> None:
        self._listener.close()
        tasks = [self._beating, *self._dialing.values()]
        self.follow({})
        for connection in list(self._strangers):
            connection.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop(self, ident: str) -> None:
        self.links.pop(ident).close()
        if (dialing := self._dialing.pop(ident, None)) is not None:
            dialing.cancel()

    async def _keep_beating(self) -> None:
        while True:
            for link in list(self.links.values()):
                link.beat()
            await asyncio.sleep(self._heartbeat)

    # Connections.

    async def _keep_dialing(self, record: HostRecord) -> None:
        family = _family(record.address)
        while True:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.bind((self._address, 0))
                async with asyncio.timeout(self._timeout):
                    await self._loop.sock_connect(sock, (record.address, record.port))
            except (OSError, TimeoutError):
                sock.close()
            except BaseException:
                sock.close()
                raise
            else:
                ended = asyncio.Event()
                connection = self._connection(sock, SessionEnd.CLIENT, ended)
                connection.send(HostGreeting(self._ident, record.ident))
                await ended.wait()
            await asyncio.sleep(self._timeout / _REDIALS)

    def _took(self, sock: socket.socket) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._reject(
                "unwelcome", f"{MOST_STRANGERS} connections to the host links have not greeted; one more is refused"
            )
            sock.close()
            return
        self._connection(sock, SessionEnd.SERVER, None)

    def _not_taken(self, error: OSError) -> None:
        self._reject("not-accepted", f"a host link could not be taken: {error}")

    def _connection(self, sock: socket.socket, end: SessionEnd, ended: asyncio.Event | None) -> Connection:
        with suppress(OSError):  # it has ended already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._timeout * 1000))

        def closed(connection: Connection, kind: str, reason: str) -> None:
            self._closed(connection, kind, reason)
            if ended is not None:
                ended.set()

        connection = Connection(sock, self._key, FromHost, received=self._received, closed=closed, end=end)
        self._strangers[connection] = self._loop.call_later(self._timeout, connection.close)
        return connection

    def _closed(self, connection: Connection, kind: str, reason: str) -> None:
        if (timer := self._strangers.pop(connection, None)) is not None:
            timer.cancel()
        ident = self._of.pop(connection, None)
        if ident is not None and ident in self.links:
            self.links[ident].lost(connection)
        if kind:
            self._reject(kind, f"{ident or 'a stranger'} over a host link: {reason}")

    def _received(self, connection: Connection, received: ReceivedMessage[Any]) -> None:
        ident = self._of.get(connection)
        if isinstance(received.message, HostGreeting):
            if ident is None:
                self._greeted(connection, received.message)
            else:
                connection.close("bad-message", "greeted twice")
        elif ident is None:
            connection.close("unregistered", f"{type(received.message).__name__} before HostGreeting")
        elif ident in self.links:
            self.links[ident].take(received)
        else:
            connection.close()  # its record has gone

    def _greeted(self, connection: Connection, greeting: HostGreeting) -> None:
        """A supervisor that is not known yet, or is not any more, is not answered; if it should be, it comes again."""
        link = self.links.get(greeting.ident)
        if link is None or greeting.to != self._ident:
            connection.close()
            return
        self._strangers.pop(connection).cancel()
        self._of[connection] = greeting.ident
        if greeting.ident < self._ident:  # it dialed
            connection.send(HostGreeting(self._ident, greeting.ident))
        link.use(connection)
        link.tell(self._news)


def listen_at(address: str, port: int) -> socket.socket:
    """Raises :class:`OSError` that says where it could not listen."""
    sock = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen()
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"the host links cannot listen at {address}, port {port}: {error.strerror}"
        ) from error
    return sock


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
