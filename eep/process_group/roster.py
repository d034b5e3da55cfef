"""Which ranks there are, and which life of each, where no supervisor says so. :mod:`eep.process_group.agreement` asks it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from eep.abi.collectives import OwnerState
from eep.data_plane.rendezvous import Rendezvous
from eep.process_group.view_log import ViewLog
from eep.process_group.world import World
from eep.view import View


class Views(Protocol):
    """Where ranks commit views. An epoch has the first one that was committed for it."""

    def commit(self, view: View) -> View: ...
    def latest(self) -> View | None: ...


class Roster(Protocol):
    @property
    def views(self) -> Views: ...

    @property
    def place(self) -> str:
        """Where the instance meets, for messages."""
        ...

    def alive(self) -> dict[int, int]:
        """The ranks that are not known to have ended, and their incarnations."""
        ...

    def newest(self, rank: int) -> int | None:
        """The newest incarnation of a rank that has been there."""
        ...

    def remote_lives(self, ranks: Iterable[int]) -> dict[int, int]:
        """The newest incarnations of those of ``ranks`` that are on other hosts."""
        ...

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` of which it is not known on which host they are."""
        ...

    def announce(self, state: OwnerState) -> None: ...

    def state_of(self, rank: int) -> OwnerState:
        """What the newest life of a rank says of itself; :class:`eep.PeerUnreachable` if it does not answer."""
        ...

    def close(self) -> None:
        """After the world was left."""
        ...


class LocalRoster:
    """All ranks are on this host, and meet in a directory."""

    def __init__(self, world: World, rendezvous: Rendezvous, *, temporary: bool) -> None:
        """A ``temporary`` rendezvous is removed by the last rank that leaves."""
        self._world, self._rendezvous, self._temporary = world, rendezvous, temporary
        self._log = ViewLog(rendezvous.path)

    @property
    def views(self) -> Views:
        return self._log

    @property
    def place(self) -> str:
        return str(self._rendezvous.path)

    def alive(self) -> dict[int, int]:
        return self._rendezvous.claimed_ranks()

    def newest(self, rank: int) -> int | None:
        return self._rendezvous.latest(rank)

    def remote_lives(self, ranks: Iterable[int]) -> dict[int, int]:
        return {}

    def missing(self, ranks: Iterable[int]) -> list[int]:
        return []

    def announce(self, state: OwnerState) -> None:
        self._world.endpoint.announce(state)

    def state_of(self, rank: int) -> OwnerState:
        return self._world.endpoint.state_of(rank)

    def close(self) -> None:
        # Every rank looks after it has left, so the last one sees no claim. A rank that looks later finds an empty place.
        with self._rendezvous.deserted() as deserted:
            if deserted:
                self._log.clear()
                if self._temporary:
                    self._rendezvous.remove()
