"""Views of an instance without a supervisor: the ranks commit them among themselves (:mod:`eep.process_group.roster`).

Every change is one of: the first view of a launch, a view without some ranks, a view with some more. Survivors that noticed
different things at different times still go through the same views, because an epoch is committed once and all others
find it done.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterable, Mapping

from eep.abi.collectives import CollectiveArgs, Element, Kind, OwnerState, Reduction
from eep.data_plane.memory.exchange import Offer
from eep.data_plane.transport.remote_hosts import LinkedPeer
from eep.errors import PeerUnreachable, RankInUse
from eep.process_group.peer_state import PeerState
from eep.process_group.roster import Roster
from eep.process_group.world import World
from eep.view import View

_LOOKS_EVERY = 0.002
_LINKS_EVERY = 0.05
_VOTES = "eep/votes"
_LINGER_S = 10.0
"""How long a rank that leaves waits for others to come in: they are there, and only a stopped one takes that long."""


class Agreement:
    """What one rank does to agree with the others."""

    def __init__(self, world: World, roster: Roster) -> None:
        self._world, self._roster, self._log = world, roster, roster.views
        self._votes = world.open_lane(_VOTES, range(world.size))

    def found(self, timeout: float) -> View:
        """Waits for all ranks of the launch, and enters the first view with them. PeerUnreachable if one of them is not
        there in time, or has been there and has ended. The others may still be about to come in: see :meth:`linger`."""
        end = time.monotonic() + timeout
        seen: dict[int, int] = {}
        waits = False
        with self._world.changing:
            try:
                while True:
                    latest = self._log.latest()
                    if latest is not None and self._is_in(latest):
                        return self._enter_first(latest, end)
                    self._refuse_if_running(latest)
                    if not waits:
                        self._roster.announce(OwnerState.WAITING)
                        waits = True
                    alive = self._roster.alive()
                    _check_none_has_ended([rank for rank in seen if rank not in alive])
                    seen |= alive
                    try:
                        first = self._first_view(latest.epoch + 1 if latest else 1, _a_while(end))
                    except PeerUnreachable:
                        if time.monotonic() >= end:
                            raise
                        continue
                    committed = self._log.commit(first)
                    if self._is_in(committed):
                        return self._enter_first(committed, end)
                    if time.monotonic() >= end:
                        raise PeerUnreachable(f"the ranks could not agree on a first view within {timeout:.0f} s")
                    time.sleep(_LOOKS_EVERY)
            finally:
                if waits:
                    self._roster.announce(OwnerState.ALONE)

    def linger(self) -> None:
        """Before the world is left. A rank that was let in with this one, or by it, may not have come in yet. It would find
        this one gone, and with it what this one has sent to it."""
        endpoint, end = self._world.endpoint, time.monotonic() + _LINGER_S
        while time.monotonic() < end:
            coming = {rank for rank in endpoint.view.active if endpoint.is_waiting(rank)}
            if coming <= {*endpoint.dead_peers()}:
                return
            time.sleep(_LOOKS_EVERY)

    def deactivate(self, ranks: Iterable[int], timeout: float) -> View:
        """Goes on without ``ranks``. Every survivor calls it; a survivor that comes later finds it done."""
        gone = set(ranks)
        if self._world.rank in gone:
            raise ValueError(f"rank {self._world.rank} cannot deactivate itself; destroy the process group instead")
        end = time.monotonic() + timeout
        with self._world.changing:
            view = self._catch_up(end)
            while gone & set(view.active):
                self._world.revoke(view.epoch)
                view = self._enter(self._log.commit(view.without(gone)), end)
            return view

    def recover(self, ranks: Iterable[int], timeout: float) -> View:
        """Lets in ``ranks``, which wait in :meth:`join`. Every survivor calls it between the same two steps.

        Nothing changes unless all survivors can reach all of them. Half of the time is for reaching them. The rest is for the
        vote: a survivor that waited in vain must still find the others there.
        """
        start = time.monotonic()
        end = start + timeout
        with self._world.changing:
            wanted = set(ranks) - set(self._world.view.active)
            problem = ""
            missed: tuple[int, ...] = ()
            joining: dict[int, int] = {}
            try:
                joining = self._prepare_waiting(wanted, start + timeout / 2)
            except PeerUnreachable as error:
                problem, missed = str(error), error.ranks
            try:
                if not self._vote(not problem, max(0.1, end - time.monotonic())):
                    raise PeerUnreachable(
                        f"{problem or 'another survivor could not reach a rank that was to join'}; nothing has changed",
                        missed,
                    )
                if not wanted:
                    return self._world.view
                view = self._log.commit(self._world.view.joined_by(joining))
                return self._world.apply(view, max(0.1, end - time.monotonic()))
            except BaseException:
                self._world.forget_prepared()
                raise

    def join(self, timeout: float) -> View:
        """Waits until the members have let this rank in, and enters their view."""
        end = time.monotonic() + timeout
        with self._world.changing:
            self._roster.announce(OwnerState.WAITING)
            try:
                while (latest := self._log.latest()) is None or not self._is_in(latest):
                    self._meet(latest)
                    if time.monotonic() >= end:
                        raise PeerUnreachable(
                            f"no view lets in incarnation {self._world.endpoint.incarnation} of rank {self._world.rank} "
                            f"within {timeout:.0f} s: the others must call eep.pg.recover_ranks"
                        )
                    time.sleep(_LOOKS_EVERY)
                return self._enter(latest, end)
            finally:
                self._roster.announce(OwnerState.ALONE)

    def state_of(self, rank: int) -> PeerState:
        view = self._world.view
        if rank in view.active:
            if self._world.endpoint.has_left(rank):
                return PeerState.LEFT
            return PeerState.DEAD if rank in self._world.endpoint.dead_peers() else PeerState.ACTIVE
        newest = self._roster.newest(rank)
        if newest is None or newest <= view.incarnations[rank]:
            return PeerState.ABSENT
        try:
            state = self._roster.state_of(rank)
        except PeerUnreachable:
            return PeerState.STARTING
        return PeerState.WAITING if state is OwnerState.WAITING else PeerState.STARTING

    def close(self) -> None:
        """After the world was left."""
        self._roster.close()

    def _prepare(self, ranks: Iterable[int], timeout: float) -> Mapping[int, Offer | LinkedPeer]:
        """Maps ``ranks``, or has links with them, ahead of a view with them."""
        if missing := self._roster.missing(ranks):
            time.sleep(_LOOKS_EVERY)
            raise PeerUnreachable(f"rank {missing[0]} has not come", tuple(missing))
        return self._world.prepare(ranks, timeout, self._roster.remote_lives(ranks))

    def _first_view(self, epoch: int, timeout: float) -> View:
        """Of all ranks of the launch, once each waits to come in."""
        offers = self._prepare(range(self._world.size), timeout)
        if absent := [rank for rank, offer in offers.items() if offer.state is not OwnerState.WAITING]:
            time.sleep(_LOOKS_EVERY)
            raise PeerUnreachable(f"rank {absent[0]} has not come", tuple(absent))
        incarnations = {rank: offer.incarnation for rank, offer in offers.items()}
        incarnations[self._world.rank] = self._world.endpoint.incarnation
        return View(
            epoch,
            tuple(range(self._world.size)),
            tuple(incarnations.get(rank, -1) for rank in range(self._world.endpoint.max_ranks)),
        )

    def _meet(self, view: View | None) -> None:
        """Links are made by both ends: those who are to let this rank in wait for its own."""
        lives = self._roster.remote_lives(view.active) if view is not None else {}
        with contextlib.suppress(PeerUnreachable):
            self._world.prepare(lives, _LINKS_EVERY, lives)

    def _catch_up(self, end: float) -> View:
        latest = self._log.latest()
        if latest is not None and latest.epoch > self._world.view.epoch:
            return self._enter(latest, end)
        return self._world.view

    def _enter_first(self, view: View, end: float) -> View:
        """Enters the first view of a launch, which begins with all its ranks or not at all."""
        while True:
            try:
                return self._world.apply(view, _a_while(end))
            except PeerUnreachable:
                _check_none_has_ended(self._dead_in(view))
                if time.monotonic() >= end:
                    raise

    def _enter(self, view: View, end: float) -> View:
        """Enters a view that others have entered before; those of them that have died since are left out."""
        while True:
            try:
                return self._world.apply(view, _a_while(end))
            except PeerUnreachable:
                dead = self._dead_in(view)
                if not dead or time.monotonic() >= end:
                    raise
                view = self._log.commit(view.without(dead))

    def _dead_in(self, view: View) -> list[int]:
        alive = self._roster.alive()
        return [rank for rank in view.active if alive.get(rank) != view.incarnations[rank]]

    def _vote(self, yes: bool, timeout: float) -> bool:
        ballot = ctypes.c_uint8(yes)
        args = CollectiveArgs(kind=Kind.ALL_REDUCE, element=Element.U8, reduction=Reduction.MIN, bytes=1)
        args.in_ = args.out = ctypes.addressof(ballot)
        self._votes.call("recover_ranks", args, timeout)
        return bool(ballot.value)

    def _prepare_waiting(self, ranks: set[int], end: float) -> dict[int, int]:
        """Maps ``ranks`` once they wait to be let in. Returns their incarnations."""
        while True:
            lives = self._roster.remote_lives(ranks)
            last = self._world.view.incarnations
            if stale := [rank for rank, life in lives.items() if life <= last[rank]]:
                problem, blamed = f"rank {stale[0]} has not come back", tuple(stale)
            else:
                offers = self._prepare(ranks, max(0.0, end - time.monotonic()))
                incarnations = {rank: offer.incarnation for rank, offer in offers.items()}
                unready = [rank for rank, offer in offers.items() if offer.state is not OwnerState.WAITING]
                unready += [rank for rank in offers if incarnations[rank] <= last[rank]]
                if not unready:
                    return incarnations
                problem, blamed = f"rank {unready[0]} does not wait to be let in (eep.pg.join)", tuple(unready)
            if time.monotonic() >= end:
                raise PeerUnreachable(problem, blamed)
            time.sleep(_LOOKS_EVERY)

    def _is_in(self, view: View) -> bool:
        return (
            self._world.rank in view.active and view.incarnations[self._world.rank] == self._world.endpoint.incarnation
        )

    def _refuse_if_running(self, latest: View | None) -> None:
        if latest is None:
            return
        alive = self._roster.alive()
        running = [r for r in latest.active if r != self._world.rank and alive.get(r) == latest.incarnations[r]]
        if running:
            raise RankInUse(
                f"an instance runs in {self._roster.place} without this rank (epoch {latest.epoch}, rank {running[0]} "
                "lives); start with eep.pg.Options(defer_join=True) and join it, or choose another rendezvous"
            )


def _a_while(end: float) -> float:
    """How long to wait before looking whether there is still something to wait for."""
    return min(1.0, max(0.1, end - time.monotonic()))


def _check_none_has_ended(ranks: list[int]) -> None:
    if ranks:
        raise PeerUnreachable(
            f"rank {ranks[0]} has ended before all ranks were in; start all of them again", tuple(ranks)
        )
