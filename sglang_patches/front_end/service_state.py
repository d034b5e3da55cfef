"""Whether a server can serve, as its front end sees it. Pure: the caller gives the times.

A view change stops the ranks for milliseconds. That is no reason to tell a probe that the server is not ready: a request that
comes meanwhile is served a moment later. It is one when nothing has run for longer than a request should wait.
"""

from __future__ import annotations

from collections.abc import Collection

LONGEST_PAUSE_S = 5.0


class ServiceState:
    """``fewest``: how many ranks of all hosts can serve; fewer wait for others. Each host serves with its own."""

    def __init__(self, fewest: int = 1) -> None:
        self._fewest = max(1, fewest)
        self.elsewhere = 0
        """How many ranks of other hosts are in."""
        self.draining = False
        """An operator wants no new requests."""
        self._stopped_at: float | None = None
        """Since when no request can get on; None while they can."""
        self._running = False

    def seen(self, live: int, running: bool, now: float, serving: int | None = None) -> None:
        """So many ranks of this host are in, and ``serving`` of them take requests: all, if it is None. ``running`` says
        whether they run or settle."""
        self._running = running
        self.recount(live, live if serving is None else serving, now)

    def recount(self, live: int, serving: int, now: float) -> None:
        """So many ranks of this host are in and take requests; whether they run is as it was."""
        if self._running and serving and live + self.elsewhere >= self._fewest:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now

    def why_not_ready(self, live: int, wanted: int, now: float, experts_only: Collection[int] = ()) -> str | None:
        """Why the server is not ready, or has fewer ranks than ``wanted``; None if it is and has. ``experts_only``: those
        that take no requests, if no other is in."""
        if self.draining:
            return "the server drains"
        if live == 0:
            which = "no rank of this host" if self.elsewhere else "no rank"
            return f"{which} is in; the supervisor is bringing them back"
        if (total := live + self.elsewhere) < self._fewest:
            return (
                f"{total} ranks are in, and {self._fewest} are needed to hold every expert; the others are on their way"
            )
        if experts_only:
            return (
                f"no rank that serves requests is in: ranks {sorted(experts_only)} serve experts only, and the others are on "
                "their way ('eep rank role R both' has one serve requests)"
            )
        if total < wanted:
            return f"{total} of {wanted} ranks are in"
        if self._stopped_at is not None and now - self._stopped_at > LONGEST_PAUSE_S:
            return f"no step has been committed for {now - self._stopped_at:.0f} s: the ranks settle in a view"
        return None

    def why_unhealthy(self, limit: float, now: float) -> str | None:
        """Why the server is as good as dead: nothing could be served for ``limit`` seconds, after which requests fail."""
        if self._stopped_at is None or now - self._stopped_at <= limit:
            return None
        return f"nothing could be served for {now - self._stopped_at:.0f} s"
