"""The registry for several hosts: its keys live in the store of the control plane, each under a lease.

The store is asynchronous and belongs to one event loop; the backup service and repair are not. So a thread of its own
runs the loop, keeps the leases alive and follows all changes, and a scan reads what it has seen. While the store does
not answer, the last records seen stay: a reader of a writer that is gone then fails, and the next source takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from eep.errors import EepError
from eep.experts.registry.directory_registry import MOST_BYTES

_PREFIX = "experts/"
_ANSWER_S = 30.0  # for the store to do what it was asked, retries included
_PAUSE_S = 0.1

T = TypeVar("T")


class _Entry(Protocol):
    @property
    def value(self) -> bytes: ...
    @property
    def version(self) -> int: ...


class _Swap(Protocol):
    @property
    def done(self) -> bool: ...


class LeasedStore(Protocol):
    """The part of the control plane's store that a registry uses: keys under leases."""

    async def get(self, key: str) -> _Entry | None: ...
    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> _Swap: ...
    def watch(self, prefix: str) -> AsyncIterator[Any]:
        """First a listing (``entries`` by key), then changes (``key``, ``value`` or None)."""

    async def grant(self, ttl: float) -> int: ...
    async def keep_alive(self, lease: int) -> bool: ...
    async def end_lease(self, lease: int) -> None: ...
    async def close(self) -> None: ...


class StoreRegistry:
    """A :class:`~eep.experts.registry.directory_registry.Registry` over the store that ``connect`` opens.

    A record ends ``ttl`` seconds after its writer was last heard of, since a host that has vanished cannot say so.
    """

    def __init__(self, connect: Callable[[], LeasedStore], ttl: float = 5.0) -> None:
        self._ttl = ttl
        self._seen: dict[str, bytes] = {}
        self._mine: dict[str, tuple[bytes, int]] = {}
        self._writing = asyncio.Lock()
        self._trouble = "nothing"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="eep-store-registry", daemon=True)
        self._thread.start()
        self._store = self._run(_call(connect))
        self._listed = threading.Event()
        self._tasks = [
            asyncio.run_coroutine_threadsafe(work(), self._loop) for work in (self._follow, self._keep_alive)
        ]
        if not self._listed.wait(_ANSWER_S):
            self.close()
            raise self._no_answer()

    def publish(self, key: str, value: bytes) -> None:
        if len(value) > MOST_BYTES:
            raise ValueError(f"the record {key} has {len(value)} bytes; at most {MOST_BYTES} are allowed")
        self._run(self._publish(key, value))

    def withdraw(self, key: str) -> None:
        self._run(self._withdraw(key))

    def scan(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in list(self._seen.items()) if key.startswith(prefix)}

    def close(self) -> None:
        """Withdraw everything that this object published, and let go of the store."""
        for key in list(self._mine):
            with contextlib.suppress(Exception):
                self.withdraw(key)
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            self._run(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _publish(self, key: str, value: bytes) -> None:
        async with self._writing:
            known = self._mine.get(key)
            await self._write(key, value, known[1] if known else None)

    async def _write(self, key: str, value: bytes, lease: int | None) -> None:
        """Tries until the caller gives up: a store that is busy, or elects a leader, is away for seconds."""
        while True:
            try:
                if lease is None:
                    lease = await self._store.grant(self._ttl)
                entry = await self._store.get(_PREFIX + key)
                swap = await self._store.compare_and_swap(_PREFIX + key, entry.version if entry else 0, value, lease)
                if swap.done:
                    break
            except Exception as error:
                self._trouble = str(error)
                lease = None  # the lease may be what has ended
                await asyncio.sleep(_PAUSE_S)
        self._mine[key] = (value, lease)
        self._seen[key] = value

    async def _withdraw(self, key: str) -> None:
        async with self._writing:
            known = self._mine.pop(key, None)
            if known is not None:
                if self._seen.get(key) == known[0]:  # else it is another writer's, under a lease of its own
                    del self._seen[key]
                with contextlib.suppress(Exception):  # the lease ends by itself, since no task keeps it alive any more
                    await self._store.end_lease(known[1])

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            for key, known in list(self._mine.items()):
                with contextlib.suppress(Exception):  # the store is away for a while; the next turn tries again
                    async with asyncio.timeout(self._ttl):
                        await self._renew(key, known)

    async def _renew(self, key: str, known: tuple[bytes, int]) -> None:
        value, lease = known
        if not await self._store.keep_alive(lease):
            async with self._writing:
                if self._mine.get(key) == known:  # neither withdrawn nor replaced meanwhile
                    await self._write(key, value, None)

    async def _follow(self) -> None:
        while True:
            try:  # as above; a new watch begins with everything that is there
                changes = self._store.watch(_PREFIX)
                async for change in changes:
                    if hasattr(change, "entries"):
                        self._list(change.entries)
                    elif change.value is None:
                        self._seen.pop(change.key.removeprefix(_PREFIX), None)
                    else:
                        self._seen[change.key.removeprefix(_PREFIX)] = change.value
            except Exception as error:
                self._trouble = str(error)
            await asyncio.sleep(self._ttl / 10)

    def _list(self, entries: Mapping[str, _Entry]) -> None:
        self._seen = {key.removeprefix(_PREFIX): entry.value for key, entry in entries.items()}
        self._listed.set()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, _ANSWER_S), self._loop).result()
        except TimeoutError as error:
            raise self._no_answer() from error

    def _no_answer(self) -> EepError:
        return EepError(
            f"the store does not answer; check that it runs and that its address is right. Its last error: {self._trouble}"
        )


async def _call(make: Callable[[], T]) -> T:
    """Make something on the loop that it will belong to."""
    return make()
