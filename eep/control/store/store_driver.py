"""Carries between the pure core and a store: proposals and reports out, records and reports in, a lease kept alive.

This module decides nothing. Each duty is a task of its own that tries again until it is cancelled. A failure
becomes an event for the core, or a counted rejection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing

from eep.control.store.embedded_store import Listing, RecordStore, StoreError
from eep.control.store.key_value import ABSENT, LeaseEndedError, StoredValue
from eep.control.store.record_codec import INSTANCE_KEY, REPORT_PREFIX, encode_record, host_in, report_key
from eep.control.store.record_reader import RecordReader
from eep.membership import EVERY_HOST, Event, LeaseHeld, LeaseLost, Propose, Proposed, Report, host_of

CERTAIN_SHARE = 0.6
"""The part of the lease's time that we rely on: we let go of it before the store does."""
RENEWALS = 4
"""How many times the lease is renewed in the time that we rely on it."""
TRY_AGAIN_AFTER = 0.2


class StoreDriver:
    def __init__(
        self,
        store: RecordStore,
        ident: str,
        lease_ttl: float,
        *,
        feed: Callable[[Event], None],
        reject: Callable[[str, str], None],
        report: Callable[[], Report],
        lease_changed: Callable[[int | None], None] = lambda lease: None,
    ) -> None:
        """``feed`` takes events for the core; ``report`` gives this host's report as it is now. ``lease_changed`` gets each
        new lease, and None when one is over."""
        self._store, self._ident, self._ttl = store, ident, lease_ttl
        self._key = report_key(host_of(ident))
        self._feed, self._reject, self._current_report = feed, reject, report
        self._lease_changed = lease_changed
        self._reader = RecordReader(reject)
        self.written_at = 0.0
        """When the last write of our report that was done was asked for, by the clock of the event loop."""
        self._held = False
        self._lease: int | None = None
        self._lease_doubtful = asyncio.Event()
        self._version = ABSENT
        self._unpublished: Report | None = None
        self._publish_now = asyncio.Event()
        self._scope = EVERY_HOST
        self._reports: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for duty in (self._keep_lease(), self._watch_instance(), self._keep_published()):
            self._spawn(duty)

    async def stop(self) -> None:
        """Give the lease back, so that the others need not wait for it to end, and let go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease is not None:
            try:
                await self._store.end_lease(self._lease)
            except (StoreError, LeaseEndedError):
                pass  # it ends by itself

    def propose(self, proposal: Propose) -> None:
        self._spawn(self._swap(proposal))

    def publish(self, report: Report) -> None:
        self._unpublished = report
        self._publish_now.set()

    def write_again(self) -> None:
        """Write our report again, as it is: its new version shows that this host is there."""
        self.publish(self._current_report())

    def hold(self) -> None:
        """The others may take this host for lost by now: hold the ranks until the store has our report again."""
        if self._lease is not None and not self._held:
            self._held = True
            self._feed(LeaseLost())

    def watch_scope(self, scope: str) -> None:
        """Watch these reports from now on."""
        if scope != self._scope:
            self._scope = scope
            self.list_reports()

    def _spawn(self, duty: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(duty)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by a bug is over for good: hold the ranks rather than run on without it."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._reject("internal", f"this supervisor cannot go on and must be restarted: {error!r}")
            self._feed(LeaseLost())

    # The record.

    async def _swap(self, proposal: Propose) -> None:
        serial = proposal.instance.serial
        try:
            swap = await self._store.compare_and_swap(INSTANCE_KEY, proposal.expected, encode_record(proposal.instance))
        except StoreError as error:
            self._reject("store-silent", str(error))
            await asyncio.sleep(TRY_AGAIN_AFTER)
            self._feed(Proposed(serial, None))
            return
        if swap.done:
            assert swap.entry is not None
            self._feed(Proposed(serial, True, proposal.instance, swap.entry.version))
            return
        seen = self._reader.instance(swap.entry)
        if seen is not None:
            self._feed(Proposed(serial, False, seen.instance, seen.version))
        else:
            await asyncio.sleep(TRY_AGAIN_AFTER)
            self._feed(Proposed(serial, None))

    async def _watch_instance(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(INSTANCE_KEY)) as changes:
                    async for change in changes:
                        if isinstance(change, Listing):
                            entry = change.entries.get(INSTANCE_KEY)
                        else:
                            entry = StoredValue(change.value, change.version) if change.value is not None else None
                        if (seen := self._reader.instance(entry)) is not None:
                            self._feed(seen)
            except StoreError as error:
                self._reject("store-silent", str(error))
            await asyncio.sleep(TRY_AGAIN_AFTER)

    # The reports of others.

    def list_reports(self) -> None:
        """List the reports anew, and watch them from there."""
        if self._reports is not None:
            self._reports.cancel()
        self._reports = self._spawn(self._watch_reports(self._scope))

    async def _watch_reports(self, scope: str) -> None:
        prefix = REPORT_PREFIX if scope == EVERY_HOST else report_key(scope)
        while True:
            try:
                async with aclosing(self._store.watch(prefix)) as changes:
                    async for change in changes:
                        self._feed(self._reader.reports(change, scope))
            except StoreError as error:
                self._reject("store-silent", str(error))
            await asyncio.sleep(TRY_AGAIN_AFTER)

    # Our own report, and the lease that keeps it there.

    async def _keep_lease(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time()
            if await self._register():
                self._lease_doubtful.clear()
                self._go_on()
                self._lease_changed(self._lease)
                await self._renew_until_lost(asked)
                self._lease = None
                self._feed(LeaseLost())
                self._lease_changed(None)
            else:
                await asyncio.sleep(TRY_AGAIN_AFTER)

    def _go_on(self) -> None:
        self._held = False
        self._feed(LeaseHeld())
        self.list_reports()

    async def _register(self) -> bool:
        asked = asyncio.get_running_loop().time()
        try:
            lease = await self._store.grant(self._ttl)
            held = await self._store.get(self._key)
            if held is not None and self._is_of_another(held):
                self._reject(
                    "host-claimed",
                    f"another supervisor runs as host {host_in(self._key)}; stop it, or give this host another name",
                )
                await self._store.end_lease(lease)
                return False
            version = held.version if held else ABSENT
            swap = await self._store.compare_and_swap(self._key, version, encode_record(self._current_report()), lease)
        except (StoreError, LeaseEndedError) as error:
            self._reject("store-silent", str(error))
            return False
        if swap.done and swap.entry is not None:
            self._lease, self._version, self.written_at = lease, swap.entry.version, asked
        return swap.done

    def _is_of_another(self, entry: StoredValue[bytes]) -> bool:
        """What is no report at all is no claim either, and is written over."""
        report = self._reader.report(self._key, entry.value)
        return report is not None and report.ident != self._ident

    async def _renew_until_lost(self, renewed: float) -> None:
        loop, certain_for = asyncio.get_running_loop(), self._ttl * CERTAIN_SHARE
        assert self._lease is not None
        while True:
            try:
                async with asyncio.timeout_at(renewed + certain_for):
                    try:
                        await asyncio.wait_for(self._lease_doubtful.wait(), certain_for / RENEWALS)
                        return
                    except TimeoutError:
                        pass
                    asked = loop.time()
                    if not await self._store.keep_alive(self._lease) or not await self._is_registered():
                        return
                    renewed = asked
            except TimeoutError:
                return
            except (StoreError, LeaseEndedError) as error:
                self._reject("store-silent", str(error))

    async def _is_registered(self) -> bool:
        """Whether our report is still there: a host that took us for lost has removed it."""
        held = await self._store.get(self._key)
        return held is not None and not self._is_of_another(held)

    async def _keep_published(self) -> None:
        while True:
            await self._publish_now.wait()
            self._publish_now.clear()
            report, lease, asked = self._unpublished, self._lease, asyncio.get_running_loop().time()
            if report is None or lease is None:
                continue
            try:
                swap = await self._store.compare_and_swap(self._key, self._version, encode_record(report), lease)
            except LeaseEndedError:
                self._lease_doubtful.set()
                continue
            except StoreError as error:
                self._reject("store-silent", str(error))
                await asyncio.sleep(TRY_AGAIN_AFTER)
                self._publish_now.set()
                continue
            if swap.entry is not None and not self._is_of_another(swap.entry):
                self._version = swap.entry.version
                if not swap.done:  # an earlier write of ours, whose answer was lost, or no report
                    self._publish_now.set()
                elif lease == self._lease:
                    self.written_at = asked
                    if self._held:
                        self._go_on()
            else:
                self._lease_doubtful.set()
