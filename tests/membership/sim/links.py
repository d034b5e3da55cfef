"""The host links of a simulated host: news and heartbeats that may be lost, doubled or late, and looks at who is silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from eep.control.store.record_codec import link_key, report_key
from eep.control.supervisor.report_keeper import ReportKeeper
from eep.membership import HostSilence, News, NewsHeard, ReadReport, after_silence, news_of
from eep.membership.host_silence import LOOKS

if TYPE_CHECKING:
    from tests.membership.sim.host import SimHost

HOST_TIMEOUT = 3.0
LATEST = 5.0
_OFTEN_LATE = 0.2


@dataclass
class SimLink:
    """What one host knows of a life of another from their link."""

    heard: int = 0
    echo: float = -1.0
    heard_us_at: float | None = None
    may_be_missed: bool = False
    silence: HostSilence | None = None
    report: ReadReport | None = None


class SimLinks:
    def __init__(self, host: SimHost) -> None:
        self._host, self._world = host, host.world
        self._links: dict[str, SimLink] = {}
        self._told: News | None = None
        self._keeper = ReportKeeper(host.store, HOST_TIMEOUT)
        self._look()

    def tell(self) -> None:
        """What is new here, to all others."""
        news = news_of(self._host.state)
        if news != self._told:
            self._told = news
            if not news.is_empty:
                self.say(news)

    def say(self, news: News) -> None:
        late = self._world.random.uniform(0, LATEST) if self._world.random.random() < _OFTEN_LATE else 0.0
        self._send("news", lambda other: other.feed(NewsHeard(news)), late)

    def reset(self) -> None:
        self._links.clear()

    def _send(self, kind: str, take: Callable[[SimHost], None], late: float = 0.0) -> None:
        source = self._host.name
        for other in list(self._world.hosts.values()):
            for _ in range(2 if self._world.random.random() < self._world.duplication else 1):
                self._world.counts[kind] += other.name != source
                if other.name != source and self._world.passes(source, other.name):
                    delay = self._world.delay(source, other.name) + late
                    self._world.at(delay, partial(other.do, partial(take, other)))

    def _look(self) -> None:
        for ident in [ident for ident in self._links if not self._is_recorded(ident)]:
            del self._links[ident]
        ident, number = self._host.state.ident, self._host.clock
        self._send(
            "beat", lambda other: other.links and other.links.hear(ident, number, self._echo_for(other.state.ident))
        )
        heard_at = [link.heard_us_at for link in self._links.values() if link.heard_us_at is not None]
        self._keeper.look(self._host.clock, heard_at)
        for ident, link in self._links.items():
            self._look_at(ident, link)
        self._host.later(HOST_TIMEOUT / LOOKS, self._look)

    def _echo_for(self, ident: str) -> float:
        return self._links[ident].echo if ident in self._links else -1.0

    def hear(self, ident: str, number: float, echo: float) -> None:
        if not self._is_recorded(ident):
            return
        link = self._links.setdefault(ident, SimLink(heard_us_at=self._host.clock))
        link.heard += 1
        link.echo = max(link.echo, number)
        if echo >= 0:
            # No greeting comes before a beat here, so only an echo shows that both ends are linked.
            link.may_be_missed = True
            link.heard_us_at = max(link.heard_us_at or 0.0, min(echo, self._host.clock))

    def _is_recorded(self, ident: str) -> bool:
        entry = self._world.store.get(link_key(ident.partition("#")[0]))
        return entry is not None and entry.value == ident

    def _look_at(self, ident: str, link: SimLink) -> None:
        if not link.may_be_missed:
            return
        seen = link.silence = after_silence(link.silence, link.heard, link.report, self._host.clock, HOST_TIMEOUT)
        if not seen.is_quiet(HOST_TIMEOUT):
            link.report = None
        elif self._host.state.leased and seen.is_lost(HOST_TIMEOUT):
            link.report = None
            self._host.store.ask("remove", lambda: self._remove(ident, seen.version), lambda removed: None)
        else:
            self._host.store.ask("read-report", lambda: self._version(ident), partial(self._read, link))

    def _read(self, link: SimLink, version: int) -> None:
        link.report = ReadReport(version, self._host.clock)

    def _version(self, ident: str) -> int:
        entry: Any = self._world.store.get(report_key(ident.partition("#")[0]))
        return entry.version if entry is not None and entry.value.ident == ident else 0

    def _remove(self, ident: str, version: int) -> bool:
        name = ident.partition("#")[0]
        removed = self._world.store.remove(report_key(name), version)
        if removed:
            self._world.on_host_lost(name)
            address = self._world.store.get(link_key(name))
            if address is not None and address.value == ident:
                self._world.store.remove(link_key(name), address.version)
        return removed
