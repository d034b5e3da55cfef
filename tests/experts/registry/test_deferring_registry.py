"""What a rank says to ranks of other hosts: never waited for, and said again until the store has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.errors import EepError
from eep.experts.registry.deferring_registry import DeferringRegistry
from eep.experts.registry.directory_registry import DirectoryRegistry

PATIENCE_S = 30.0


class Store:
    """A store that can be away, or hang."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.is_away = False
        self.answers, self.was_asked = threading.Event(), threading.Event()
        self.answers.set()

    def publish(self, key: str, value: bytes) -> None:
        self._ask()
        self.records[key] = value

    def withdraw(self, key: str) -> None:
        self._ask()
        self.records.pop(key, None)

    def scan(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.records.items() if key.startswith(prefix)}

    def _ask(self) -> None:
        self.was_asked.set()
        assert self.answers.wait(PATIENCE_S)
        if self.is_away:
            raise EepError("the store does not answer")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def registry(tmp_path: Path, store: Store) -> Iterator[DeferringRegistry]:
    made = DeferringRegistry(DirectoryRegistry(tmp_path / "near"), store)
    yield made
    store.is_away = False
    store.answers.set()
    made.close()


def test_a_store_that_hangs_holds_up_no_rank(tmp_path: Path, store: Store, registry: DeferringRegistry) -> None:
    store.answers.clear()
    registry.publish("held/r0.i0", b"1")
    assert store.was_asked.wait(PATIENCE_S)
    registry.publish("held/r0.i0", b"2")
    registry.publish("held/r0.i0", b"3")
    assert DirectoryRegistry(tmp_path / "near").scan("") == {"held/r0.i0": b"3"}, "ranks of this host know at once"
    assert not registry.flush(0.0)
    store.answers.set()
    assert registry.flush(PATIENCE_S)
    assert store.records == {"held/r0.i0": b"3"}


def test_what_a_store_did_not_take_is_said_again(
    store: Store, registry: DeferringRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    store.is_away = True
    registry.publish("held/r0.i0", b"1")
    registry.publish("load/r0.i0", b"2")
    end = time.monotonic() + PATIENCE_S
    while "is said again: the store does not answer" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    store.is_away = False
    assert registry.flush(PATIENCE_S)
    assert store.records == {"held/r0.i0": b"1", "load/r0.i0": b"2"}
    assert caplog.text.count("is said again") == 1


def test_what_is_withdrawn_is_gone_everywhere(tmp_path: Path, store: Store, registry: DeferringRegistry) -> None:
    registry.publish("a", b"1")
    registry.publish("b", b"2")
    registry.withdraw("a")
    assert registry.flush(PATIENCE_S)
    assert registry.scan("") == store.records == {"b": b"2"}
    registry.close()
    assert store.records == DirectoryRegistry(tmp_path / "near").scan("") == {}


def test_this_host_knows_its_own_ranks_better_than_the_store(
    tmp_path: Path, store: Store, registry: DeferringRegistry
) -> None:
    store.records = {"held/r0.i0": b"old", "held/r2.i0": b"far"}
    peer = DirectoryRegistry(tmp_path / "near")
    peer.publish("held/r0.i0", b"new")
    assert registry.scan("held/") == {"held/r0.i0": b"new", "held/r2.i0": b"far"}
