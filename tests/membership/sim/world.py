"""Virtual time, a network that fails, and a store of three nodes: what the simulated hosts live in.

Everything that happens is a callback on one heap, ordered by virtual time, and every choice comes from one
seeded generator: the same seed gives the same run, event for event.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from eep.control.store.key_value import Change, KeyValue

if TYPE_CHECKING:
    from tests.membership.sim.host import SimHost

NODES = ("n0", "n1", "n2")


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.hosts: dict[str, SimHost] = {}
        self.store: KeyValue[Any] = KeyValue()
        self.nodes_down: set[str] = set()
        self.blocked: set[tuple[str, str]] = set()
        """One-way: (from, to) pairs of hosts, nodes, over which nothing passes."""
        self.loss = 0.0
        self.duplication = 0.0
        self.slow: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.on_change: Callable[[Change[Any]], None] = lambda change: None
        self.on_host_lost: Callable[[str], None] = lambda host: None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._watchers: dict[str, tuple[str, Callable[[Change[Any]], None], Callable[[], None]]] = {}

    # Time.

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), action))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Run to virtual time ``until``, or until ``stop``; whether it was ``stop`` that ended it."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self._serve_changes()
            if stop():
                return True
        self.now = until
        return False

    # The network.

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self.blocked and self.random.random() >= self.loss

    def delay(self, *ends: str) -> float:
        base = self.random.uniform(0.001, 0.02)
        return base * 40 if any(end in self.slow for end in ends) else base

    # The store.

    def serves(self, node: str) -> bool:
        """Whether a node is up and can talk to a majority, itself included."""
        if node in self.nodes_down:
            return False
        friends = [
            other
            for other in NODES
            if other not in self.nodes_down and not {(node, other), (other, node)} & self.blocked
        ]
        return len(friends) > len(NODES) // 2

    def request(
        self, host: str, node: str, action: Callable[[], Any], answer: Callable[[Any], None], kind: str
    ) -> None:
        """One round trip. Either leg may be lost, and a request may arrive twice; an answer comes once or never."""
        self.counts[kind] += 1
        answered = False

        def deliver(result: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                answer(result)

        def arrive() -> None:
            if not self.serves(node):
                return
            self.store.expire(self.now)
            result = action()
            if self.passes(node, host):
                self.at(self.delay(host, node), lambda: deliver(result))

        for _ in range(2 if self.random.random() < self.duplication else 1):
            if self.passes(host, node):
                self.at(self.delay(host, node), arrive)

    def watch(
        self,
        name: str,
        node: str,
        matches: str,
        deliver: Callable[[Change[Any]], None],
        broken: Callable[[], None],
    ) -> None:
        """Deliver each later change under ``matches`` to the watcher ``name``, in no certain order, perhaps twice."""
        self._watchers[name] = (f"{node} {matches}", deliver, broken)

    def unwatch(self, name: str) -> None:
        self._watchers.pop(name, None)

    def expire_leases(self) -> None:
        due = self.store.next_expiry()
        # With no majority anywhere there is no leader, and without a leader leases do not end.
        if due is not None and due <= self.now and any(self.serves(node) for node in NODES):
            self.store.expire(self.now)

    def _serve_changes(self) -> None:
        for change in self.store.drain():
            self.on_change(change)
            for name, (where, deliver, broken) in list(self._watchers.items()):
                node, _, matches = where.partition(" ")
                if not change.key.startswith(matches):
                    continue
                host = name.partition(":")[0]
                if not self.serves(node) or not self.passes(node, host):
                    # A stream with a hole in it is broken, not silently thinner: its owner lists again.
                    self.unwatch(name)
                    self.at(self.delay(host, node), broken)
                    continue
                self.counts["watch"] += 1
                for _ in range(2 if self.random.random() < self.duplication else 1):
                    self.at(self.delay(host, node), partial(deliver, change))
