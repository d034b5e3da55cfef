"""What supervisors tell each other directly, before the store has it. News is evidence as a report is; the store decides.

News only ever adds: a life that has ended does not come back, and a revoked epoch stays revoked. So news that is lost,
late, repeated or out of order does no harm, and what is known of a host is all that it ever said. A host speaks for its
own ranks alone: what it says of others' is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from eep.membership.records import InstanceRecord, Life, RankReport, Report, host_of


@dataclass(frozen=True, slots=True)
class News:
    """What the supervisor ``ident`` says: the lives of its ranks that have ended, and the last epoch that its ranks can no
    longer finish."""

    ident: str
    dead: Mapping[int, int] = field(default_factory=dict)
    """The incarnation of each rank that was in and is dead."""
    revoked: int = -1

    @property
    def is_empty(self) -> bool:
        return not self.dead and self.revoked < 0


NewsByHost = Mapping[str, News]


def with_news(known: NewsByHost, news: News) -> NewsByHost:
    """What is known after ``news``. That of an earlier supervisor of the same host is dropped."""
    host = host_of(news.ident)
    before = known.get(host)
    if before is not None and before.ident == news.ident:
        dead = dict(before.dead)
        for rank, incarnation in news.dead.items():
            dead[rank] = max(incarnation, dead.get(rank, incarnation))
        news = News(news.ident, dead, max(before.revoked, news.revoked))
    return {**known, host: news}


def why_revoked(instance: InstanceRecord, known: NewsByHost) -> str | None:
    """Why no rank can finish a step of this view any more, as other hosts say; None if they say no such thing."""
    view = instance.view
    for host, news in known.items():
        ranks = [rank for rank in view.active if instance.owners[rank] == news.ident]
        for rank in ranks:
            if news.dead.get(rank) == view.incarnations[rank]:
                return f"{host} says that rank {rank} (incarnation {view.incarnations[rank]}) is dead"
        if ranks and news.revoked == view.epoch:
            return f"{host} says that epoch {view.epoch} is revoked"
    return None


def brought_up_to_date(reports: Mapping[str, Report], known: NewsByHost) -> Mapping[str, Report]:
    """The reports, without the lives that their own hosts have said to be over since."""
    return {host: _after_news(report, known.get(host)) for host, report in reports.items()}


def _after_news(report: Report, news: News | None) -> Report:
    if news is None or news.ident != report.ident:
        return report
    over = {
        rank: RankReport(Life.RESTING, told.incarnation)
        for rank, told in report.ranks.items()
        if told.life.alive and news.dead.get(rank) == told.incarnation
    }
    return replace(report, ranks={**report.ranks, **over}) if over else report
