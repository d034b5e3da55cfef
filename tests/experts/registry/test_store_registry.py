"""Records in the store of the control plane: seen by others, gone with their lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from eep.errors import EepError
from eep.experts.registry.directory_registry import MOST_BYTES, wait_for_change
from eep.experts.registry.store_registry import StoreRegistry

store = pytest.importorskip("eep.control.store.embedded_store", reason="needs the control plane")

PATIENCE = 60.0


class Shared:
    """One embedded store for several registries: calls travel to the loop that it belongs to."""

    def __init__(self) -> None:
        self.home: asyncio.AbstractEventLoop | None = None
        self.inner: Any = None

    def connect(self) -> Any:
        if self.inner is None:
            self.home, self.inner = asyncio.get_running_loop(), store.EmbeddedStore()
            return self.inner
        return Guest(self)


class Guest:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        for name in ("get", "compare_and_swap", "grant", "keep_alive", "end_lease"):
            setattr(self, name, self._forward(name))

    def _forward(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            work = getattr(self._shared.inner, name)(*arguments)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._shared.home))

        return call

    async def watch(self, prefix: str) -> Any:
        changes = self._shared.inner.watch(prefix)
        while True:
            work = asyncio.run_coroutine_threadsafe(anext(changes), self._shared.home)
            yield await asyncio.wrap_future(work)

    async def close(self) -> None:
        pass


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def registries(shared: Shared, request: pytest.FixtureRequest) -> Iterator[list[StoreRegistry]]:
    """With leases that no loaded machine is too slow to renew, unless a test waits for the end of one."""
    made = [StoreRegistry(shared.connect, ttl=getattr(request, "param", 60.0)) for _ in range(2)]
    yield made
    for registry in reversed(made):
        registry.close()


waits_for_leases = pytest.mark.parametrize("registries", [2.0], indirect=True)


def test_records_are_seen_by_others_replaced_and_withdrawn(registries: list[StoreRegistry]) -> None:
    first, second = registries
    first.publish("backups/a", b"1")
    assert first.scan("backups/") == {"backups/a": b"1"}
    assert wait_for_change(second, "backups/", {}, PATIENCE) == {"backups/a": b"1"}
    first.publish("backups/a", b"2")
    assert wait_for_change(second, "backups/", {"backups/a": b"1"}, PATIENCE) == {"backups/a": b"2"}
    first.withdraw("backups/a")
    first.withdraw("backups/a")
    assert wait_for_change(second, "backups/", {"backups/a": b"2"}, PATIENCE) == {}
    with pytest.raises(ValueError, match="at most 8388608 are allowed"):
        first.publish("backups/a", b"x" * (MOST_BYTES + 1))


def test_withdrawing_leaves_the_record_of_the_next_writer(registries: list[StoreRegistry]) -> None:
    old, new = registries
    old.publish("backups/host", b"old")
    new.publish("backups/host", b"new")
    assert wait_for_change(old, "backups/", {"backups/host": b"old"}, PATIENCE) == {"backups/host": b"new"}
    old.withdraw("backups/host")
    assert old.scan("backups/") == {"backups/host": b"new"}
    old.publish("backups/other", b"1")
    assert wait_for_change(new, "backups/other", {}, PATIENCE), "it has seen everything that was done before"
    assert new.scan("backups/host") == {"backups/host": b"new"}


@waits_for_leases
def test_a_record_goes_with_the_lease_of_its_writer(registries: list[StoreRegistry]) -> None:
    first, second = registries
    second.publish("backups/b", b"1")
    assert wait_for_change(first, "backups/", {}, PATIENCE) == {"backups/b": b"1"}
    # The writer falls silent, as a host does that has lost its power.
    second._loop.call_soon_threadsafe(second._tasks[1].cancel)
    assert wait_for_change(first, "backups/", {"backups/b": b"1"}, PATIENCE) == {}


@waits_for_leases
@pytest.mark.parametrize("times", [0, 2])
def test_a_record_whose_lease_was_lost_is_published_again(registries: list[StoreRegistry], times: int) -> None:
    """Also when the store is away at that moment."""
    first, second = registries
    second.publish("backups/b", b"1")
    assert wait_for_change(first, "backups/", {}, PATIENCE) == {"backups/b": b"1"}
    lease = second._mine["backups/b"][1]
    fail_at_first(second._store, "grant", times)
    second._run(second._store.end_lease(lease))
    deadline = time.monotonic() + PATIENCE
    while second._mine.get("backups/b", (b"", lease))[1] == lease:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while first.scan("backups/") != {"backups/b": b"1"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail_at_first(guest: Any, name: str, times: int) -> None:
    """As an etcd does that is busy, or that elects a leader."""
    works, failures = getattr(guest, name), iter(range(times))

    async def call(*arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise store.StoreError("no answer within 2 s")
        return await works(*arguments)

    setattr(guest, name, call)


@pytest.mark.parametrize("name", ["grant", "get", "compare_and_swap"])
def test_a_store_that_is_away_for_a_moment_is_asked_again(registries: list[StoreRegistry], name: str) -> None:
    first, second = registries
    for value in (b"1", b"2"):  # with a lease that is yet to be had, and with one that is there
        fail_at_first(second._store, name, 2)
        known = first.scan("backups/")
        second.publish("backups/b", value)
        assert wait_for_change(first, "backups/", known, PATIENCE) == {"backups/b": value}


def test_a_lease_that_ended_is_no_reason_not_to_publish(registries: list[StoreRegistry]) -> None:
    first, second = registries
    second.publish("backups/b", b"1")
    assert wait_for_change(first, "backups/", {}, PATIENCE) == {"backups/b": b"1"}
    second._run(second._store.end_lease(second._mine["backups/b"][1]))
    assert wait_for_change(first, "backups/", {"backups/b": b"1"}, PATIENCE) == {}
    second.publish("backups/b", b"2")
    assert wait_for_change(first, "backups/", {}, PATIENCE) == {"backups/b": b"2"}


def test_a_store_that_stays_away_is_an_error_that_says_so(
    registries: list[StoreRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = registries
    monkeypatch.setattr("eep.experts.registry.store_registry._ANSWER_S", 1.0)
    fail_at_first(second._store, "grant", 10**6)
    with pytest.raises(EepError, match="does not answer"):
        second.publish("backups/b", b"1")
    assert second.scan("") == {}


def test_a_store_that_does_not_answer_is_an_error_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eep.experts.registry.store_registry._ANSWER_S", 2.0)

    class Silent(Guest):
        def __init__(self) -> None:
            pass

        async def watch(self, prefix: str) -> Any:
            raise store.StoreError("no answer")
            yield

    with pytest.raises(EepError, match="does not answer"):
        StoreRegistry(Silent)
