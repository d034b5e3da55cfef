"""How a simulated host talks to the store: calls that may go unanswered, watches that break, a lease that may end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eep.control.store.key_value import Change, LeaseEndedError
from eep.control.store.record_codec import INSTANCE_KEY, REPORT_PREFIX, host_in, link_key, report_key
from eep.membership import (
    EVERY_HOST,
    InstanceSeen,
    LeaseHeld,
    LeaseLost,
    Propose,
    Proposed,
    Report,
    ReportSeen,
    ReportsListed,
    report_of,
)
from tests.membership.sim.world import NODES

if TYPE_CHECKING:
    from tests.membership.sim.host import SimHost

LEASE_TTL = 6.0
CERTAIN_FOR = 4.0
"""How long after it was last renewed a host relies on its lease: less than the store does."""
ANSWER_WITHIN = 1.0
TRY_AGAIN_AFTER = 0.2


class StoreClient:
    def __init__(self, host: SimHost) -> None:
        self._host, self._world, self._store = host, host.world, host.world.store
        self._key = report_key(host.name)
        self._node = host.world.random.choice(NODES)
        self._lease: int | None = None
        self._renewed = 0.0
        self.written_at = 0.0
        self._held = False
        self._registering = False
        self._report: Report | None = None
        self._report_version = 0
        self._publishing = False
        self._scope = ""
        self._streams = 0
        self._reports_stream = ""
        self._watch_instance()

    def _call(
        self, kind: str, action: Callable[[], Any], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        done = False

        def once(then: Callable[[], None]) -> None:
            nonlocal done
            if not done:
                done = True
                then()

        def answered(result: Any) -> None:
            self._host.do(lambda: once(lambda: answer(result)))

        def give_up() -> None:
            if not done:
                self._node = self._world.random.choice(NODES)
            once(lost)

        self._world.request(self._host.name, self._node, action, answered, kind)
        self._host.later(ANSWER_WITHIN, give_up)

    def ask(self, kind: str, action: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """Once. If no answer comes, the caller looks again."""
        self._call(kind, action, answer, lambda: None)

    def propose(self, effect: Propose) -> None:
        serial = effect.instance.serial

        def answer(swap: Any) -> None:
            entry = swap.entry
            found = (entry.value, entry.version) if entry else (None, 0)
            self._host.feed(Proposed(serial, swap.done, *found))

        def lost() -> None:
            self._host.feed(Proposed(serial, None))
            self._read_instance()

        self._call(
            "propose",
            lambda: self._store.compare_and_swap(INSTANCE_KEY, effect.expected, effect.instance),
            answer,
            lost,
        )

    def _read_instance(self) -> None:
        self._call(
            "read",
            lambda: self._store.get(INSTANCE_KEY),
            lambda entry: self._host.feed(InstanceSeen(entry.value, entry.version) if entry else InstanceSeen(None, 0)),
            self._read_instance,
        )

    def _watch_instance(self) -> None:
        self._streams += 1
        name, node = f"{self._host.name}:{self._host.state.ident}:{self._streams}", self._node

        def seen(change: Change[Any]) -> None:
            self._host.do(lambda: self._host.feed(InstanceSeen(change.value, change.version)))

        def broken() -> None:
            self._host.do(lambda: self._host.later(TRY_AGAIN_AFTER, self._watch_instance))

        def listed(entry: Any) -> None:
            self._host.feed(InstanceSeen(entry.value, entry.version) if entry else InstanceSeen(None, 0))

        def subscribe() -> Any:
            self._world.watch(name, node, INSTANCE_KEY, seen, broken)
            return self._store.get(INSTANCE_KEY)

        self._call(
            "watch-instance",
            subscribe,
            listed,
            lambda: self._host.later(TRY_AGAIN_AFTER, self._watch_instance),
        )

    def watch_scope(self, scope: str) -> None:
        if scope != self._scope:
            self._scope = scope
            self.list_reports()

    def list_reports(self) -> None:
        scope, node = self._scope, self._node
        self._world.unwatch(self._reports_stream)
        self._streams += 1
        name = self._reports_stream = f"{self._host.name}:{self._host.state.ident}:{self._streams}"
        prefix = REPORT_PREFIX if scope == EVERY_HOST else report_key(scope)

        def seen(change: Change[Any]) -> None:
            self._host.do(lambda: self._host.feed(ReportSeen(host_in(change.key), change.value, change.version)))

        def again() -> None:
            self._host.later(TRY_AGAIN_AFTER, list_again)

        def list_again() -> None:
            if name == self._reports_stream:
                self.list_reports()

        def subscribe() -> Any:
            if name == self._reports_stream:  # otherwise its connection was closed before it got there
                self._world.watch(name, node, prefix, seen, lambda: self._host.do(again))
            return self._store.scan(prefix), self._store.revision

        def listed(result: Any) -> None:
            if name == self._reports_stream:
                entries, revision = result
                reports = {host_in(key): entry.value for key, entry in entries.items()}
                self._host.feed(ReportsListed(reports, scope, revision))

        self._call("watch-reports", subscribe, listed, again)

    # The lease.

    def renew_lease(self) -> None:
        """Called now and then: renew the lease, or let go when it is no longer certain, or ask for one."""
        if self._lease is not None and self._host.clock - self._renewed > CERTAIN_FOR:
            self._let_go()
        if self._lease is None:
            self._register()
            return
        lease, asked = self._lease, self._host.clock

        def renewed(stands: bool) -> None:
            if lease == self._lease:
                if stands:
                    self._renewed = asked
                else:
                    self._let_go()

        def renew() -> bool:
            entry = self._store.get(self._key)
            registered = entry is not None and entry.value.ident == self._host.state.ident
            return self._store.keep_alive(lease, self._world.now) and registered

        self._call("keep-alive", renew, renewed, lambda: None)

    def _let_go(self) -> None:
        self._lease = None
        self._host.feed(LeaseLost())
        if self._host.links is not None:
            self._host.links.reset()

    def write_again(self) -> None:
        self.publish(report_of(self._host.state))

    def hold(self) -> None:
        if self._lease is not None and not self._held:
            self._held = True
            self._host.feed(LeaseLost())

    def _go_on(self) -> None:
        self._held = False
        self._host.feed(LeaseHeld())
        self.list_reports()

    def _register(self) -> None:
        if self._registering:
            return
        self._registering = True
        asked = self._host.clock

        def failed() -> None:
            self._registering = False

        def granted(found: Any) -> None:
            lease, entry = found
            if entry is not None and entry.value.ident != self._host.state.ident:
                failed()  # another supervisor has the name until its lease ends
                return
            version, report = entry.version if entry else 0, report_of(self._host.state)
            self._call("register", lambda: self._put(version, report, lease), lambda s: held(lease, s), failed)

        def held(lease: int, swap: Any) -> None:
            self._registering = False
            if swap is not None and swap.done:
                self._lease, self._report_version, self._renewed = lease, swap.entry.version, asked
                self.written_at = asked
                self._go_on()
                self._read_instance()
                if self._host.links is not None:
                    self.ask("link-record", lambda: self._put_link(lease), lambda swap: None)

        self._call(
            "grant",
            lambda: (self._store.grant(LEASE_TTL, self._world.now), self._store.get(self._key)),
            granted,
            failed,
        )

    def _put(self, expected: int, report: Report, lease: int) -> Any:
        try:
            return self._store.compare_and_swap(self._key, expected, report, lease)
        except LeaseEndedError:
            return None

    def _put_link(self, lease: int) -> Any:
        key = link_key(self._host.name)
        held = self._store.get(key)
        try:
            return self._store.compare_and_swap(key, held.version if held else 0, self._host.state.ident, lease)
        except LeaseEndedError:
            return None

    def publish(self, report: Report) -> None:
        self._report = report
        self._publish()

    def _publish(self) -> None:
        if self._publishing or self._report is None or self._lease is None:
            return
        self._publishing = True
        report, lease, expected, asked = self._report, self._lease, self._report_version, self._host.clock

        def answered(swap: Any) -> None:
            self._publishing = False
            if lease != self._lease:
                self._publish()
            elif swap is None or swap.entry is None or swap.entry.value.ident != self._host.state.ident:
                self._let_go()
            else:
                self._report_version = swap.entry.version
                if swap.done:
                    self.written_at = asked
                    if self._held:
                        self._go_on()
                if not swap.done or self._report is not report:
                    self._publish()

        def lost() -> None:
            self._publishing = False
            self._host.later(TRY_AGAIN_AFTER, self._publish)

        self._call("publish", lambda: self._put(expected, report, lease), answered, lost)
