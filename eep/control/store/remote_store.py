"""A store that lives in another host's supervisor: the client of :mod:`eep.control.store.store_server`.

The connection is made when it is first needed and again after it broke; what was under way when it broke fails with
:class:`StoreError`, and the caller tries again.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from eep.control.store.embedded_store import Listing, StoreError
from eep.control.store.key_value import Change, Entry, LeaseEndedError, Swap
from eep.control.store.store_messages import (
    CompareAndSwap,
    EndLease,
    FromStore,
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
    Unwatch,
    Watch,
)
from eep.control.wire.connection import Connection
from eep.control.wire.messages import Message
from eep.control.wire.sealed_frames import End, Received

A = TypeVar("A", bound=Message)


class RemoteStore:
    """``address`` is given by the operator, never by a peer."""

    def __init__(
        self, address: tuple[str, int], key: bytes, *, answer_within: float = 2.0, listen_for: float = 5.0
    ) -> None:
        self._address, self._key = address, key
        self._answer_within, self._listen_for = answer_within, listen_for
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._calls = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Any]] = {}

    async def get(self, key: str) -> Entry[bytes] | None:
        return _entry((await self._ask(Get(next(self._calls), key), IsEntry)).entry)

    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> Swap[bytes]:
        answer = await self._ask(CompareAndSwap(next(self._calls), key, expected, value, lease), IsSwap)
        return Swap(answer.done, _entry(answer.entry))

    async def watch(self, prefix: str) -> AsyncGenerator[Listing | Change[bytes], None]:
        """Lists again whenever nothing was heard for a while: a store that hangs looks just like a quiet one."""
        while True:
            call = next(self._calls)
            answers: asyncio.Queue[Any] = asyncio.Queue()
            self._waiting[call] = answers
            try:
                await self._send(Watch(call, prefix))
                listing = await self._next(answers, IsListing, self._answer_within)
                entries = {key: Entry(held.value, held.version) for key, held in listing.entries.items()}
                yield Listing(entries, listing.version)
                while True:
                    try:
                        change = await asyncio.wait_for(answers.get(), self._listen_for)
                    except TimeoutError:
                        break
                    if not isinstance(change, IsChange):
                        raise StoreError("the connection to the store broke; list again and go on from there")
                    yield Change(change.key, change.value, change.version)
            finally:
                del self._waiting[call]
                if self._connection is not None:
                    self._connection.send(Unwatch(call))

    async def grant(self, ttl: float) -> int:
        return (await self._ask(Grant(next(self._calls), ttl), IsNumber)).number

    async def keep_alive(self, lease: int) -> bool:
        return (await self._ask(KeepAlive(next(self._calls), lease), IsNumber)).number == 1

    async def end_lease(self, lease: int) -> None:
        await self._ask(EndLease(next(self._calls), lease), IsNumber)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _ask(self, message: Any, answer: type[A]) -> A:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting[message.call] = answers
        try:
            await self._send(message)
            return await self._next(answers, answer, self._answer_within)
        finally:
            del self._waiting[message.call]

    async def _next(self, answers: asyncio.Queue[Any], kind: type[A], within: float) -> A:
        try:
            answer = await asyncio.wait_for(answers.get(), within)
        except TimeoutError as error:
            raise StoreError(f"the store at {_named(self._address)} did not answer within {within} s") from error
        if isinstance(answer, IsLeaseEnded):
            raise LeaseEndedError(answer.reason)
        if not isinstance(answer, kind):
            raise StoreError(f"the connection to the store at {_named(self._address)} broke")
        return answer

    async def _send(self, message: Message) -> None:
        async with self._connecting:
            if self._connection is None:
                self._connection = await self._connect()
        self._connection.send(message)

    async def _connect(self) -> Connection:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.timeout(self._answer_within):
                await asyncio.get_running_loop().sock_connect(sock, self._address)
        except OSError as error:
            sock.close()
            raise StoreError(f"the store at {_named(self._address)} cannot be reached: {error}") from error
        return Connection(sock, self._key, FromStore, received=self._received, closed=self._closed, end=End.CLIENT)

    def _received(self, _: Connection, received: Received[Any]) -> None:
        waiting = self._waiting.get(received.message.call)
        if waiting is not None:  # otherwise the caller has given up
            waiting.put_nowait(received.message)

    def _closed(self, connection: Connection, kind: str, reason: str) -> None:
        if connection is self._connection:
            self._connection = None
        for waiting in self._waiting.values():
            waiting.put_nowait(None)


def _entry(stored: StoredEntry | None) -> Entry[bytes] | None:
    return Entry(stored.value, stored.version) if stored is not None else None


def _named(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
