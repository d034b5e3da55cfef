"""Which ranks are there before they have memory in common, so that no rank waits for one that is gone.

A rank holds a lock from its constructor to its end. A rank that was there and lost its lock has ended or failed: those who
wait to meet it stop waiting.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from eep.data_plane.endpoint import Endpoint
from eep.data_plane.rendezvous import Rendezvous
from eep.errors import PeerUnreachable

_LOOK_EVERY_S = 0.1
_GRACE_S = 1.0
"""A rank may leave as soon as all have entered a barrier, while some still look who has. One that left without entering it
is given up after this time; one that died, at once."""


class Presence:
    """This rank is there until :meth:`close`."""

    def __init__(self, directory: pathlib.Path, rank: int) -> None:
        self._rendezvous = Rendezvous(directory)
        self._claim = self._rendezvous.claim(rank)

    def close(self) -> None:
        self._claim.close()

    def life_of(self, rank: int) -> int | None:
        """Which process of ``rank`` is there, counted from 0; None if none is."""
        return self._rendezvous.latest(rank)

    def lost(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of ``ranks`` that were there and are gone. One that has not come yet is not lost."""
        try:
            return tuple(rank for rank in ranks if self._rendezvous.was_lost(rank))
        except FileNotFoundError:
            return (0,)  # which takes the directory with it if it made it

    def patiently(self, ranks: Iterable[int], patience_s: float, attempt: Callable[[float], object]) -> None:
        """Repeats ``attempt(seconds)`` while it raises :class:`PeerUnreachable`, until patience ends or a rank is lost."""
        ranks, deadline = tuple(ranks), time.monotonic() + patience_s
        while True:
            try:
                attempt(_LOOK_EVERY_S)
                return
            except (PeerUnreachable, FileNotFoundError):
                self.check(ranks)
                if time.monotonic() >= deadline:
                    raise

    def check(self, ranks: Iterable[int]) -> None:
        """Raises :class:`PeerUnreachable` if one of ``ranks`` is lost."""
        if lost := self.lost(ranks):
            raise PeerUnreachable(
                f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} ended or failed before the ranks had met; read "
                "the error there for the cause",
                lost,
            )

    @contextlib.contextmanager
    def watching(self, ranks: Iterable[int], endpoint: Endpoint) -> Iterator[None]:
        """For a barrier of ``ranks``: ``endpoint`` does not wait for those of them that are gone meanwhile."""
        ranks, over = tuple(ranks), threading.Event()

        def watch() -> None:
            gone_since: dict[int, float] = {}
            while not over.wait(_LOOK_EVERY_S):
                now = time.monotonic()
                gone_since = {rank: gone_since.get(rank, now) for rank in self.lost(ranks)}
                late = {rank for rank, since in gone_since.items() if now - since >= _GRACE_S}
                for rank in late.union(endpoint.dead_peers()):
                    endpoint.suspect(rank)

        thread = threading.Thread(target=watch, name="eep-presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
