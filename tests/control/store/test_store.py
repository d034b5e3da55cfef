"""The same tests for every store: embedded, and a real three-node etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from eep.control.store.embedded_store import (
    ABSENT,
    Change,
    EmbeddedStore,
    LeaseEndedError,
    Listing,
    RecordStore,
    StoredValue,
    Swap,
)
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.control.wire.sealed_frames import new_key
from tests.control.store.etcd_cluster import EtcdCluster

PATIENCE = 60.0
_names = itertools.count()

OpenStore = Callable[[], "contextlib.AbstractAsyncContextManager[RecordStore]"]


@pytest.fixture(params=["embedded", "etcd"])
def open_store(request: pytest.FixtureRequest) -> OpenStore:
    """A fresh store of each kind; entered inside the event loop of the test."""
    cluster: EtcdCluster | None = request.getfixturevalue("etcd") if request.param == "etcd" else None

    @asynccontextmanager
    async def opened() -> AsyncIterator[RecordStore]:
        if cluster is not None:
            name, seal = f"test-{next(_names)}", RecordSeal(new_key())
            yield EtcdStore(cluster.endpoints, name, seal=seal, answer_within=10.0)
            return
        embedded = EmbeddedStore()
        try:
            yield embedded
        finally:
            await embedded.close()

    return opened


def run(open_store: OpenStore, test: Callable[[RecordStore], Awaitable[None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(PATIENCE), open_store() as store:
            await test(store)

    asyncio.run(body())


def test_a_key_is_written_only_over_what_was_expected(open_store: OpenStore) -> None:
    async def body(store: RecordStore) -> None:
        assert await store.get("k") is None
        first = await store.compare_and_swap("k", ABSENT, b"one")
        assert first.done
        assert first.entry is not None
        assert await store.get("k") == first.entry
        assert await store.compare_and_swap("k", ABSENT, b"two") == Swap(False, first.entry)
        second = await store.compare_and_swap("k", first.entry.version, b"two")
        assert second.entry is not None
        assert second.entry.version > first.entry.version
        assert await store.compare_and_swap("k", first.entry.version, b"three") == Swap(False, second.entry)
        assert await store.get("k") == StoredValue(b"two", second.entry.version)
        assert await store.compare_and_swap("none", 7, b"") == Swap(False, None)

    run(open_store, body)


def test_of_many_at_once_one_wins(open_store: OpenStore) -> None:
    async def body(store: RecordStore) -> None:
        swaps = await asyncio.gather(*[store.compare_and_swap("k", ABSENT, b"%d" % n) for n in range(16)])
        (winner,) = [swap for swap in swaps if swap.done]
        assert all(swap.entry == winner.entry for swap in swaps)

    run(open_store, body)


def test_a_watch_lists_and_then_tells_every_change_in_order(open_store: OpenStore) -> None:
    async def body(store: RecordStore) -> None:
        await store.compare_and_swap("a/1", ABSENT, b"before")
        await store.compare_and_swap("b/1", ABSENT, b"elsewhere")
        watch = store.watch("a/")
        listing = await anext(watch)
        assert isinstance(listing, Listing)
        assert {key: entry.value for key, entry in listing.entries.items()} == {"a/1": b"before"}
        version = listing.entries["a/1"].version
        for value in (b"x", b"y", b"\x00\xff" * 1000):
            swap = await store.compare_and_swap("a/1", version, value)
            assert swap.entry is not None
            version = swap.entry.version
            await store.compare_and_swap("b/2", ABSENT, b"not ours")
        changes = [await anext(watch) for _ in range(3)]
        assert [change.value for change in changes if isinstance(change, Change)] == [
            b"x",
            b"y",
            b"\x00\xff" * 1000,
        ]
        versions = [change.version for change in changes]
        assert versions == sorted(set(versions))
        assert versions[0] > listing.version

    run(open_store, body)


def test_leased_keys_end_with_their_lease(open_store: OpenStore) -> None:
    async def body(store: RecordStore) -> None:
        lease = await store.grant(3.0)
        await store.compare_and_swap("a/leased", ABSENT, b"x", lease)
        await store.compare_and_swap("a/lasting", ABSENT, b"y")
        async for news in store.watch("a/"):  # its lease is not kept alive
            # A watch lists at first, and again when it has heard nothing for a while.
            if isinstance(news, Listing):
                gone = {"a/leased", "a/lasting"} - news.entries.keys()
            else:
                gone = {news.key} if news.value is None else set()
            assert gone <= {"a/leased"}
            if gone:
                break
        assert not await store.keep_alive(lease)
        with pytest.raises(LeaseEndedError, match="register again"):
            await store.compare_and_swap("a/leased", ABSENT, b"z", lease)
        assert await store.get("a/leased") is None
        assert await store.get("a/lasting") is not None

    run(open_store, body)


def test_a_lease_that_is_kept_alive_stands(open_store: OpenStore) -> None:
    async def body(store: RecordStore) -> None:
        lease = await store.grant(20.0)
        await store.compare_and_swap("k", ABSENT, b"x", lease)
        for _ in range(3):
            assert await store.keep_alive(lease)
        assert await store.get("k") is not None
        await store.end_lease(lease)
        assert await store.get("k") is None
        await store.end_lease(lease)

    run(open_store, body)


def test_a_key_is_removed_only_at_the_version_that_is_named(open_store: OpenStore) -> None:
    async def body(store: RecordStore) -> None:
        lease = await store.grant(60.0)
        first = await store.compare_and_swap("k", ABSENT, b"1", lease)
        second = await store.compare_and_swap("k", first.entry.version if first.entry else 0, b"2", lease)
        assert first.entry is not None
        assert second.entry is not None
        assert not await store.remove("k", first.entry.version)
        assert await store.get("k") == second.entry
        assert await store.remove("k", second.entry.version)
        assert await store.get("k") is None
        assert not await store.remove("k", second.entry.version)

    run(open_store, body)
