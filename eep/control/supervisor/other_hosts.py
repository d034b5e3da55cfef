"""What a supervisor has to do with those of other hosts: links that carry news, looks at who is silent, and being heard.

Without settings it has nothing to do with them: all it knows of other hosts then comes from the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from eep.control.links.host_links import HostLinks, listen_at
from eep.control.links.host_records import HostRecord, HostRecords
from eep.control.store.embedded_store import RecordStore
from eep.control.supervisor.host_watch import HostWatch
from eep.control.supervisor.rank_watch import StalledHost
from eep.control.supervisor.report_keeper import ReportKeeper, WrittenReport
from eep.control.supervisor.settings import LinkSettings
from eep.membership import LinksSeen, News, NewsHeard, news_of
from eep.membership.host_silence import LOOKS


@dataclass(frozen=True, slots=True)
class _Parts:
    links: HostLinks
    records: HostRecords
    watch: HostWatch
    keeper: ReportKeeper


class OtherHosts:
    def __init__(
        self,
        host: StalledHost,
        settings: LinkSettings | None,
        *,
        note: Callable[[str, str], None],
        reject: Callable[[str, str], None],
    ) -> None:
        self._host, self._settings = host, settings
        self._note, self._reject = note, reject
        self._parts: _Parts | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._told: News | None = None
        self._down: tuple[str, ...] = ()

    def start(self, ident: str, store: RecordStore, report: WrittenReport) -> None:
        """In the running event loop. Raises :class:`OSError` if this host does not have the address."""
        settings = self._settings
        if settings is None:
            return
        listening = listen_at(settings.address, settings.port)
        record = HostRecord(ident, settings.address, listening.getsockname()[1])
        links = HostLinks(
            ident,
            settings.key,
            listening,
            timeout=settings.host_timeout_s,
            heartbeat=settings.heartbeat_s,
            heard=lambda news: self._host.feed(NewsHeard(news)),
            reject=self._reject,
        )
        self._parts = _Parts(
            links,
            HostRecords(store, record, links.follow, self._reject),
            HostWatch(store, settings.host_timeout_s, note=self._note, reject=self._reject),
            ReportKeeper(report, settings.host_timeout_s),
        )
        self._look_every(settings.host_timeout_s / LOOKS)

    def lease_changed(self, lease: int | None) -> None:
        """Our record hangs on the lease. When that ends the others drop us, and we must not miss them before we are linked
        anew."""
        if self._parts is not None:
            self._parts.records.lease_changed(lease)
            if lease is None:
                self._parts.links.reset()

    def tell(self) -> None:
        """Tell the others what is new here. Called after every step of the core."""
        if self._parts is not None and (news := news_of(self._host.state)) != self._told:
            self._told = news
            self._parts.links.tell(news)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._parts is not None:
            await self._parts.watch.stop()
            await self._parts.records.stop()
            await self._parts.links.stop()

    def status(self) -> dict[str, bool] | None:
        """The other supervisors, and whether a connection to each is up; None: there are no links here."""
        if self._parts is None:
            return None
        return {ident: link.is_up for ident, link in self._parts.links.links.items()}

    def _look_every(self, pause: float) -> None:
        assert self._parts is not None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause, self._look_every, pause)
        links, now = self._parts.links.links, loop.time()
        down = tuple(sorted(ident for ident, link in links.items() if not link.is_up))
        if down != self._down:
            self._down = down
            self._host.feed(LinksSeen(down))
        self._parts.keeper.look(now, [link.heard_us_at for link in links.values() if link.heard_us_at is not None])
        self._parts.watch.look(now, links, may_remove=self._host.state.leased)
