"""Whether a server can serve, as its front end sees it. Pure: the caller gives the times.

A view change stops the ranks for milliseconds. That is no reason to tell a probe that the server is not ready: a request that
comes meanwhile is served a moment later. It is one when nothing has run for longer than a request should wait.
"""

from __future__ import annotations

LONGEST_PAUSE_S = 5.0


class ServiceState:
    """``fewest``: how many ranks can serve; fewer wait for others."""

    def __init__(self, fewest: int = 1) -> None:
        self._fewest = max(1, fewest)
        self.draining = False
        """An operator wants no new requests."""
        self._stopped_at: float | None = None
        """Since when no request can get on; None while they can."""

    def seen(self, live: int, running: bool, now: float) -> None:
        """So many ranks are in, and ``running`` says whether they run or settle."""
        if running and live >= self._fewest:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now

    def why_not_ready(self, live: int, wanted: int, now: float) -> str | None:
        """Why the server is not ready, or has fewer ranks than ``wanted``; None if it is and has."""
        if self.draining:
            return "the server drains"
        if live == 0:
            return "no rank is in; the supervisor is bringing them back"
        if live < self._fewest:
            return (
                f"{live} ranks are in, and {self._fewest} are needed to hold every expert; the others are on their way"
            )
        if live < wanted:
            return f"{live} of {wanted} ranks are in"
        if self._stopped_at is not None and now - self._stopped_at > LONGEST_PAUSE_S:
            return f"no step has been committed for {now - self._stopped_at:.0f} s: the ranks settle in a view"
        return None

    def why_unhealthy(self, limit: float, now: float) -> str | None:
        """Why the server is as good as dead: nothing could be served for ``limit`` seconds, after which requests fail."""
        if self._stopped_at is None or now - self._stopped_at <= limit:
            return None
        return f"nothing could be served for {now - self._stopped_at:.0f} s"
