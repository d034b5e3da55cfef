"""The store: where the one record and the reports live. Compare-and-swap, get, watch, lease; nothing more.

Two implementations pass the same tests: :class:`EmbeddedStore` in the supervisor's own process (one host, no service to
install), and :class:`eep.control.store.etcd_store.EtcdStore`, which several hosts share and which outlives the loss of any.

Every call ends: with an answer, or with :class:`StoreError` when none came in time. After an error a
compare-and-swap may or may not have been done; read the key to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from eep.control.store.key_value import ABSENT, Change, KeyValue, LeaseEndedError, StoredValue, Swap

__all__ = [
    "ABSENT",
    "Change",
    "EmbeddedStore",
    "LeaseEndedError",
    "Listing",
    "RecordStore",
    "StoreError",
    "StoredValue",
    "Swap",
]


class StoreError(Exception):
    """The store did not answer, or answered nonsense. A write may or may not have been done."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything under a prefix, as of ``version``: what a watch starts with."""

    entries: Mapping[str, StoredValue[bytes]]
    version: int


class RecordStore(Protocol):
    async def get(self, key: str) -> StoredValue[bytes] | None:
        """What the key holds now, as agreed by the store's majority."""

    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> Swap[bytes]:
        """Write if the key's version is ``expected`` (``ABSENT``: if there is no such key).

        Raises :class:`LeaseEndedError` if ``lease`` does not stand.
        """

    async def remove(self, key: str, expected: int) -> bool:
        """Remove the key if its version is ``expected``; whether that was so."""

    def watch(self, prefix: str) -> AsyncGenerator[Listing | Change[bytes], None]:
        """A listing, then every change after it, in order, until the caller stops or :class:`StoreError` is raised."""

    async def grant(self, ttl: float) -> int:
        """A lease that ends ``ttl`` seconds after it was last kept alive; never earlier."""

    async def keep_alive(self, lease: int) -> bool:
        """Whether the lease stood, and now stands for its full time again."""

    async def end_lease(self, lease: int) -> None:
        """Give a lease back at once, with all its keys."""

    async def close(self) -> None:
        """Let go of what the store holds. End watches first, by closing or cancelling them."""


class EmbeddedStore:
    """A store in this process. It lives and dies with its supervisor, and so do the ranks it knows of."""

    def __init__(self) -> None:
        self._contents: KeyValue[bytes] = KeyValue()
        self._watchers: dict[asyncio.Queue[Change[bytes]], str] = {}
        self._expiry: asyncio.TimerHandle | None = None

    async def get(self, key: str) -> StoredValue[bytes] | None:
        return self._contents.get(key)

    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> Swap[bytes]:
        swap = self._contents.compare_and_swap(key, expected, value, lease)
        self._tell()
        return swap

    async def remove(self, key: str, expected: int) -> bool:
        removed = self._contents.remove(key, expected)
        self._tell()
        return removed

    async def watch(self, prefix: str) -> AsyncGenerator[Listing | Change[bytes], None]:
        changes: asyncio.Queue[Change[bytes]] = asyncio.Queue()
        self._watchers[changes] = prefix
        try:
            yield Listing(self._contents.scan(prefix), self._contents.revision)
            while True:
                yield await changes.get()
        finally:
            self._watchers.pop(changes, None)

    async def grant(self, ttl: float) -> int:
        lease = self._contents.grant(ttl, self._now())
        self._schedule_expiry()
        return lease

    async def keep_alive(self, lease: int) -> bool:
        self._expire()
        return self._contents.keep_alive(lease, self._now())

    async def end_lease(self, lease: int) -> None:
        self._contents.end_lease(lease)
        self._tell()

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self) -> None:
        for change in self._contents.drain():
            for changes, prefix in self._watchers.items():
                if change.key.startswith(prefix):
                    changes.put_nowait(change)

    def _expire(self) -> None:
        self._contents.expire(self._now())
        self._tell()
        self._schedule_expiry()

    def _schedule_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        due = self._contents.next_expiry()
        if due is not None:
            self._expiry = asyncio.get_running_loop().call_at(due, self._expire)
