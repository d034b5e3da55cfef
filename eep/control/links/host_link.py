"""One host link: what is known of the other supervisor from what came over it.

The link is to one life of a supervisor. It outlives its connections: a silence goes on while the other end is dialed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eep.control.links.host_records import HostRecord
from eep.control.links.link_messages import HostBeat, HostNews
from eep.control.wire.connection import Connection
from eep.control.wire.sealed_frames import ReceivedMessage
from eep.membership import News

_PER_SECOND = 1_000_000
"""A beat is numbered by the time at which it was sent, as this end counts it."""


class HostLink:
    def __init__(self, record: HostRecord, clock: Callable[[], float], heard_news: Callable[[News], None]) -> None:
        self.record = record
        self._clock, self._heard_news = clock, heard_news
        self._connection: Connection | None = None
        self.heard = 0
        """How many messages came. While it does not change, the other end is silent."""
        self.heard_us_at: float | None = None
        """The other end has heard what this one sent then. None: it was never heard itself, and does not count on us."""
        self._number = -1
        self._echo = -1

    @property
    def is_up(self) -> bool:
        return self._connection is not None

    @property
    def may_be_missed(self) -> bool:
        """The other end sends only over a connection that it uses, and counts on us from then on (``heard_us_at``). So one
        that was heard knows that we would miss it, and tells the store that it is there when this link fails."""
        return self.heard > 0

    def use(self, connection: Connection) -> None:
        """From now on this is the connection; one before it is closed."""
        before, self._connection = self._connection, connection
        if before is not None and before is not connection:
            before.close()
        if self.heard_us_at is None:
            self.heard_us_at = self._clock()
        self.beat()

    def lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None

    def beat(self) -> None:
        if self._connection is not None:
            self._number = max(int(self._clock() * _PER_SECOND), self._number + 1)
            self._connection.send(HostBeat(self._number, self._echo))

    def tell(self, news: News) -> None:
        if self._connection is not None and not news.is_empty:
            self._connection.send(HostNews(dict(news.dead), news.revoked))

    def take(self, received: ReceivedMessage[Any]) -> None:
        """What came over the connection, after the greeting."""
        self.heard += 1
        match received.message:
            case HostBeat(number=number, echo=echo):
                self._echo = max(self._echo, number)
                if 0 <= echo <= self._number:
                    self.heard_us_at = max(self.heard_us_at or 0.0, echo / _PER_SECOND)
            case HostNews(dead=dead, revoked=revoked):
                self._heard_news(News(self.record.ident, dead, revoked))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
