"""The ranks of several hosts, as torch's store has them: each says on which host it is, which life of its rank it is, and
what it is up to. Ranks of one host meet in a directory of that host, as without other hosts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from eep.abi.collectives import OwnerState
from eep.data_plane.rendezvous import Rendezvous
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.errors import EepError, PeerUnreachable
from eep.process_group.hosts.host import Host
from eep.process_group.hosts.sealed_store import SealedStore
from eep.process_group.hosts.store_views import StoreViews
from eep.process_group.roster import LocalRoster, Views
from eep.process_group.world import World


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: int
    address: str
    state: int


class RankPlaces:
    """Where each rank is. It is asked which ranks are on other hosts (:class:`RemoteHosts`)."""

    def __init__(self, store: SealedStore, address: str) -> None:
        self._store, self._address = store, address

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and (place := self.find(rank)) is not None and place.address != self._address

    def find(self, rank: int) -> _Place | None:
        if (record := self._store.get(_name(rank))) is None:
            return None
        try:
            place = msgspec.json.decode(record, type=_Place)
            OwnerState(place.state)
        except (msgspec.DecodeError, ValueError) as error:
            raise EepError(f"what torch's store has as the place of rank {rank} is none: {error}") from error
        return place

    def tell(self, rank: int, incarnation: int, state: OwnerState) -> None:
        self._store.put(_name(rank), msgspec.json.encode(_Place(incarnation, self._address, int(state))))

    def withdraw(self, rank: int, incarnation: int) -> None:
        """Unless another life has taken its place since."""
        with contextlib.suppress(PeerUnreachable):
            if (place := self.find(rank)) is not None and place.incarnation == incarnation:
                self._store.remove(_name(rank))


def next_life(store: SealedStore, rendezvous: Rendezvous, rank: int) -> int:
    """A number that no life of ``rank`` has had, on whichever host."""
    used = rendezvous.latest(rank)
    while (life := store.count(f"lives/{rank}")) <= (-1 if used is None else used):
        pass
    return life


def reach_hosts(host: Host, store: SealedStore) -> tuple[RankPlaces, RemoteHosts]:
    """How ranks of other hosts are found and reached."""
    places = RankPlaces(store, host.address)
    return places, RemoteHosts(places, host.address, store, host.key, host.provider)


class HostRoster:
    """The ranks of this host are those of a directory, the others those of the store."""

    def __init__(self, world: World, store: SealedStore, places: RankPlaces, local: LocalRoster) -> None:
        self._world, self._store, self._places, self._local = world, store, places, local
        self._views = StoreViews(store)
        self._life = world.endpoint.incarnation
        self._places.tell(world.rank, self._life, OwnerState.ALONE)

    @property
    def views(self) -> Views:
        return self._views

    @property
    def place(self) -> str:
        return "torch's store"

    def alive(self) -> dict[int, int]:
        lives = self._local.alive() | self.remote_lives(range(self._world.endpoint.max_ranks))
        view = self._world.view
        for rank in self._world.endpoint.dead_peers():
            if lives.get(rank) == view.incarnations[rank]:
                del lives[rank]
        return lives

    def newest(self, rank: int) -> int | None:
        place = self._places.find(rank)
        return None if place is None else place.incarnation

    def remote_lives(self, ranks: Iterable[int]) -> dict[int, int]:
        found = {rank: self._places.find(rank) for rank in ranks if rank in self._places}
        return {rank: place.incarnation for rank, place in found.items() if place is not None}

    def missing(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._places.find(rank) is None]

    def announce(self, state: OwnerState) -> None:
        self._local.announce(state)
        self._places.tell(self._world.rank, self._life, state)

    def state_of(self, rank: int) -> OwnerState:
        if rank not in self._places:
            return self._local.state_of(rank)
        if (place := self._places.find(rank)) is None:
            raise PeerUnreachable(f"rank {rank} has left")
        return OwnerState(place.state)

    def close(self) -> None:
        try:
            self._places.withdraw(self._world.rank, self._life)
        finally:
            self._store.close()
            self._local.close()


def _name(rank: int) -> str:
    return f"places/{rank}"
