"""Shares a supervisor's embedded store with other hosts, over TCP on one named interface.

For a few hosts where no etcd is at hand. The store still lives in one process: losing that host loses the instance.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from eep.control.store.embedded_store import EmbeddedStore, Listing
from eep.control.store.key_value import Entry, LeaseEndedError
from eep.control.store.store_messages import (
    CompareAndSwap,
    EndLease,
    Get,
    Grant,
    IsChange,
    IsEntry,
    IsLeaseEnded,
    IsListing,
    IsNumber,
    IsSwap,
    KeepAlive,
    StoredEntry,
    ToStore,
    Unwatch,
    Watch,
)
from eep.control.wire.connection import Connection
from eep.control.wire.listener import Accepting
from eep.control.wire.sealed_frames import Received

_GET_INTERFACE_ADDRESS = 0x8915
MAX_WATCHES = 64
"""Per connection; a supervisor needs two."""
MAX_CONNECTIONS = 256
SPEAKS_WITHIN = 5.0
"""Seconds until a message with the job's key must have come: clients connect when they have something to say. Whoever cannot
say it is not to keep a connection from one who can."""


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_INTERFACE_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(f"no interface {interface!r} with an IPv4 address here; there are {known}") from error
    return socket.inet_ntoa(answer[20:24])


class StoreServer:
    """``reject`` is told of whatever does not verify."""

    def __init__(self, store: EmbeddedStore, key: bytes, reject: Callable[[str, str], None]) -> None:
        self._store, self._key, self._reject = store, key, reject
        self._accepting: Accepting | None = None
        self._connections: dict[Connection, dict[int, asyncio.Task[None]]] = {}
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        """Those that have not said anything yet, and when they are let go."""
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, interface: str, port: int = 0) -> tuple[str, int]:
        """Serve on this interface only; gives the address, with the port that was chosen if it is 0."""
        listener = socket.create_server((address_of(interface), port), backlog=64)
        listener.setblocking(False)
        self._accepting = Accepting(
            listener, self._took, lambda error: self._reject("not-accepted", f"a connection to the store: {error}")
        )
        host, port = listener.getsockname()[:2]
        return host, port

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _took(self, sock: socket.socket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._reject("unwelcome", f"a connection to the store was refused, {len(self._connections)} are open")
            sock.close()
            return
        connection = Connection(sock, self._key, ToStore, received=self._received, closed=self._closed)
        self._connections[connection] = {}
        self._strangers[connection] = asyncio.get_running_loop().call_later(
            SPEAKS_WITHIN, connection.close, "silent", f"it said nothing within {SPEAKS_WITHIN:g} s"
        )

    def _heard_from(self, connection: Connection) -> None:
        if (timer := self._strangers.pop(connection, None)) is not None:
            timer.cancel()

    def _closed(self, connection: Connection, kind: str, reason: str) -> None:
        self._heard_from(connection)
        for watch in self._connections.pop(connection, {}).values():
            watch.cancel()
        if kind:
            self._reject(kind, f"a client of the store: {reason}")

    def _received(self, connection: Connection, received: Received[Any]) -> None:
        self._heard_from(connection)
        message, watches = received.message, self._connections[connection]
        if isinstance(message, Unwatch):
            watch = watches.pop(message.call, None)
            if watch is not None:
                watch.cancel()
        elif isinstance(message, Watch):
            if message.call in watches or len(watches) >= MAX_WATCHES:
                connection.close("too-many-watches", f"watch {message.call} is one too many")
                return
            watches[message.call] = self._spawn(self._watch(connection, message))
        else:
            self._spawn(self._answer(connection, message))

    def _spawn(self, duty: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(duty)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, connection: Connection, message: Watch) -> None:
        async with aclosing(self._store.watch(message.prefix)) as changes:
            async for change in changes:
                if isinstance(change, Listing):
                    entries = {key: StoredEntry(entry.value, entry.version) for key, entry in change.entries.items()}
                    connection.send(IsListing(message.call, entries, change.version))
                else:
                    connection.send(IsChange(message.call, change.key, change.value, change.version))

    async def _answer(self, connection: Connection, message: Any) -> None:
        store = self._store
        match message:
            case Get(call=call, key=key):
                connection.send(IsEntry(call, _stored(await store.get(key))))
            case CompareAndSwap(call=call, key=key, expected=expected, value=value, lease=lease):
                try:
                    swap = await store.compare_and_swap(key, expected, value, lease)
                except LeaseEndedError as error:
                    connection.send(IsLeaseEnded(call, str(error)))
                else:
                    connection.send(IsSwap(call, swap.done, _stored(swap.entry)))
            case Grant(call=call, ttl=ttl):
                connection.send(IsNumber(call, await store.grant(ttl)))
            case KeepAlive(call=call, lease=lease):
                connection.send(IsNumber(call, int(await store.keep_alive(lease))))
            case EndLease(call=call, lease=lease):
                await store.end_lease(lease)
                connection.send(IsNumber(call, 0))


def _stored(entry: Entry[bytes] | None) -> StoredEntry | None:
    return StoredEntry(entry.value, entry.version) if entry is not None else None
