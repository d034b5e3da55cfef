"""The contents of a store: versioned keys, compare-and-swap, and leases. Pure: the caller says what time it
is.

The embedded store serves this to a job, and the simulator uses it as its model of etcd. Versions are those of
etcd: one revision counts the changes of the whole store, and an entry's version is the revision that wrote
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")

ABSENT = 0
"""The version of a key that does not exist."""


class LeaseEndedError(Exception):
    """A write named a lease that the store does not hold (any more)."""


@dataclass(frozen=True, slots=True)
class StoredValue(Generic[V]):
    value: V
    version: int


@dataclass(frozen=True, slots=True)
class Change(Generic[V]):
    """A key as it is after a change; ``value`` is None when the key went away. ``version`` orders the changes."""

    key: str
    value: V | None
    version: int


@dataclass(frozen=True, slots=True)
class Swap(Generic[V]):
    """How a compare-and-swap ended, and what the key holds now (None: nothing)."""

    done: bool
    entry: StoredValue[V] | None


@dataclass(slots=True)
class _Lease:
    ttl: float
    ends: float
    keys: set[str] = field(default_factory=set)


class KeyValue(Generic[V]):
    """Keys with versions and leases; what a write changed is handed out by :meth:`drain`."""

    def __init__(self) -> None:
        self.revision = 0
        self._changes: list[Change[V]] = []
        self._entries: dict[str, StoredValue[V]] = {}
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0

    def get(self, key: str) -> StoredValue[V] | None:
        return self._entries.get(key)

    def scan(self, prefix: str) -> dict[str, StoredValue[V]]:
        return {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}

    def compare_and_swap(self, key: str, expected: int, value: V, lease: int | None = None) -> Swap[V]:
        """Write ``value`` if the version of ``key`` is ``expected``. A leased key ends with its lease."""
        if lease is not None and lease not in self._leases:
            raise LeaseEndedError(f"lease {lease} has ended; register again to get a new one")
        current = self._entries.get(key)
        if (current.version if current else ABSENT) != expected:
            return Swap(False, current)
        self.revision += 1
        for held in self._leases.values():
            held.keys.discard(key)
        if lease is not None:
            self._leases[lease].keys.add(key)
        entry = StoredValue(value, self.revision)
        self._entries[key] = entry
        self._changes.append(Change(key, value, self.revision))
        return Swap(True, entry)

    def remove(self, key: str, expected: int) -> bool:
        """Remove ``key`` if its version is ``expected``; whether that was so."""
        current = self._entries.get(key)
        if current is None or current.version != expected:
            return False
        self.revision += 1
        for held in self._leases.values():
            held.keys.discard(key)
        del self._entries[key]
        self._changes.append(Change(key, None, self.revision))
        return True

    def grant(self, ttl: float, now: float) -> int:
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl, now + ttl)
        return self._last_lease

    def keep_alive(self, lease: int, now: float) -> bool:
        """Whether the lease still stood; if so it now ends a full ``ttl`` later."""
        held = self._leases.get(lease)
        if held is None:
            return False
        held.ends = now + held.ttl
        return True

    def end_lease(self, lease: int) -> None:
        """Give a lease back, and with it its keys. One that has ended already is no error."""
        held = self._leases.pop(lease, None)
        if held is None or not held.keys:
            return
        self.revision += 1
        for key in sorted(held.keys):
            del self._entries[key]
            self._changes.append(Change(key, None, self.revision))

    def expire(self, now: float) -> None:
        """End the leases whose time is up."""
        for lease in [number for number, held in self._leases.items() if held.ends <= now]:
            self.end_lease(lease)

    def next_expiry(self) -> float | None:
        return min((held.ends for held in self._leases.values()), default=None)

    def drain(self) -> list[Change[V]]:
        """The changes since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes
