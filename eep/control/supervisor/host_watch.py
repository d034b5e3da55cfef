"""Looks at the other hosts: one that is silent on its link, and whose report in the store does not move, is taken for lost.

The watch removes the report of such a host, if it has still not moved then. What follows is the core's: to the record, it is
the end of that host's lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

from eep.control.links.host_link import HostLink
from eep.control.store.embedded_store import RecordStore, StoreError
from eep.control.store.record_codec import RecordError, decode_report, link_key, report_key
from eep.membership import HostSilence, ReadReport, after_silence, host_of


class HostWatch:
    def __init__(
        self,
        store: RecordStore,
        timeout: float,
        *,
        note: Callable[[str, str], None],
        reject: Callable[[str, str], None],
    ) -> None:
        self._store, self._timeout = store, timeout
        self._note, self._reject = note, reject
        self._seen: dict[str, HostSilence] = {}
        self._reports: dict[str, ReadReport] = {}
        """Of quiet hosts, as last read."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def look(self, now: float, links: Mapping[str, HostLink], *, may_remove: bool) -> None:
        """At every host that is linked, by the ident of its supervisor. One that holds its own ranks removes none."""
        before, self._seen = self._seen, {}
        for ident, link in links.items():
            if not link.may_be_missed:
                continue
            seen = after_silence(before.get(ident), link.heard, self._reports.get(ident), now, self._timeout)
            self._seen[ident] = seen
            if not seen.is_quiet(self._timeout):
                self._reports.pop(ident, None)
            elif ident not in self._tasks:
                is_lost = may_remove and seen.is_lost(self._timeout)
                work = self._remove(ident, seen) if is_lost else self._read(ident)
                self._tasks[ident] = asyncio.get_running_loop().create_task(self._try(ident, work))
        self._reports = {ident: report for ident, report in self._reports.items() if ident in links}

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try(self, ident: str, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except StoreError as error:
            self._reject("store-silent", str(error))
        finally:
            del self._tasks[ident]

    async def _read(self, ident: str) -> None:
        """The version of its report; none if another supervisor has the host's name by now."""
        key = report_key(host_of(ident))
        entry = await self._store.get(key)
        try:
            report = decode_report(entry.value, host_of(ident)) if entry is not None else None
        except RecordError as error:
            self._reject("bad-record", str(error))
            return
        version = entry.version if entry is not None and report is not None and report.ident == ident else 0
        self._reports[ident] = ReadReport(version, asyncio.get_running_loop().time())

    async def _remove(self, ident: str, seen: HostSilence) -> None:
        host = host_of(ident)
        self._reports.pop(ident, None)
        address = await self._store.get(link_key(host))
        if await self._store.remove(report_key(host), seen.version):
            self._note("HOST-LOST", f"{ident} was silent for {seen.link_s:.1f} s on its link, and in the store")
            if address is not None:  # no host need wait for it to answer
                await self._store.remove(link_key(host), address.version)
