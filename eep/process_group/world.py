"""The instance as one process sees it: one endpoint and one view, which all its process groups share.

A process is in or out of all its groups at once, so membership belongs here and not to a group. Without a supervisor the
ranks commit views among themselves (:mod:`eep.view_log`) and watch each other's processes; with one, it commits and calls
:meth:`World.apply`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable

from eep import native
from eep.collective_abi import CollectiveArgs, Element, Kind, OwnerState, Reduction
from eep.endpoint import Endpoint
from eep.errors import EepError, PeerUnreachable, RankInUse
from eep.memory.exchange import Offer
from eep.peer_table import ALONE_EPOCH
from eep.peer_watch import PeerWatch
from eep.process_group.gate import Gate
from eep.process_group.lane import Lane, group_id
from eep.process_group.options import Options
from eep.rendezvous import Rendezvous
from eep.view import View
from eep.view_log import ViewLog

_LOOKS_EVERY = 0.002
_VOTES = "eep/votes"


class World:
    """Made with the default group, closed with it."""

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, options: Options, temporary: bool) -> None:
        """A ``temporary`` rendezvous is removed by the last rank that leaves."""
        max_ranks = options.max_ranks or size
        if size > max_ranks:
            raise ValueError(f"{size} ranks are more than max_ranks={max_ranks}")
        shape = native.Shape(
            max_ranks=max_ranks,
            lanes=options.lanes,
            lane_parts=1,
            lane_bytes=options.chunk_bytes,
            pipe_bytes=options.message_bytes,
        )
        self.size = size
        self.gate = Gate()
        self.endpoint = Endpoint(rank, shape, rendezvous=rendezvous, incarnation=options.incarnation)
        self.lanes: dict[str, Lane] = {}
        self._rendezvous, self._temporary = rendezvous, temporary
        self._log = ViewLog(rendezvous.path)
        self._changing = threading.Lock()
        self._on_growth: list[Callable[[int], None]] = []
        self._watch = PeerWatch(self._ended)
        self._votes = self.open_lane(_VOTES, range(size))

    @property
    def rank(self) -> int:
        return self.endpoint.rank

    @property
    def view(self) -> View:
        return self.endpoint.view

    def open_lane(self, name: str, ranks: Iterable[int]) -> Lane:
        """A lane for the group of that name. Groups that hold every rank grow with the world."""
        if name in self.lanes:
            raise EepError(f"there is a process group {name!r} already; destroy it first")
        lane = Lane(self.endpoint, self.gate, group_id(name), list(ranks))
        self.lanes[name] = lane
        return lane

    def close_lane(self, name: str) -> None:
        if (lane := self.lanes.pop(name, None)) is not None:
            lane.close()

    def on_growth(self, grown: Callable[[int], None]) -> None:
        """``grown(size)`` is called when ranks were added beyond those there were at launch."""
        self._on_growth.append(grown)

    # ---- views, committed among the ranks ----

    def found(self, timeout: float) -> View:
        """Waits for all ranks of the launch, and enters the first view with them."""
        end = time.monotonic() + timeout
        with self._changing:
            while True:
                latest = self._log.latest()
                if latest is not None and self._is_in(latest):
                    return self._apply(latest, end - time.monotonic())
                self._refuse_if_running(latest)
                prepared = self._prepare(range(self.size), max(0.0, end - time.monotonic()))
                incarnations = {rank: offer.incarnation for rank, offer in prepared.items()}
                incarnations[self.rank] = self.endpoint.incarnation
                first = View(
                    latest.epoch + 1 if latest else 1,
                    tuple(range(self.size)),
                    tuple(incarnations.get(rank, -1) for rank in range(self.endpoint.max_ranks)),
                )
                committed = self._log.commit(first)
                if self._is_in(committed):
                    return self._apply(committed, max(0.0, end - time.monotonic()), prepared)
                _close(prepared)
                if time.monotonic() >= end:
                    raise PeerUnreachable(f"the ranks could not agree on a first view within {timeout:.0f} s")
                time.sleep(_LOOKS_EVERY)

    def deactivate(self, ranks: Iterable[int], timeout: float) -> View:
        """Goes on without ``ranks``. Every survivor calls it; those who come later find it done."""
        gone = set(ranks)
        if self.rank in gone:
            raise ValueError(f"rank {self.rank} cannot deactivate itself; destroy the process group instead")
        end = time.monotonic() + timeout
        with self._changing:
            view = self._catch_up(end)
            while gone & set(view.active):
                self.endpoint.revoke()
                view = self._enter(self._log.commit(view.without(gone)), end)
            return view

    def recover(self, ranks: Iterable[int], timeout: float) -> View:
        """Lets in ``ranks``, which wait in :meth:`join`. Every survivor calls it between the same two steps.

        Nothing changes unless all survivors can reach all of them.
        """
        end = time.monotonic() + timeout
        with self._changing:
            wanted = set(ranks) - set(self.view.active)
            problem, prepared = "", {}
            try:
                prepared = self._prepare_waiting(wanted, end)
            except PeerUnreachable as error:
                problem = str(error)
            try:
                agreed = self._vote(not problem, max(0.1, end - time.monotonic()))
                if not agreed:
                    raise PeerUnreachable(
                        f"{problem or 'another survivor could not reach a rank that was to join'}; nothing has changed"
                    )
                view = self.view
                if wanted:
                    joining = {rank: offer.incarnation for rank, offer in prepared.items()}
                    view = self._log.commit(view.joined_by(joining))
                    return self._apply(view, max(0.1, end - time.monotonic()), prepared)
                return view
            except BaseException:
                _close(prepared)
                raise

    def join(self, timeout: float) -> View:
        """Waits until the members have let this rank in, and enters their view."""
        end = time.monotonic() + timeout
        with self._changing:
            self.endpoint._say(OwnerState.WAITING)
            try:
                while (latest := self._log.latest()) is None or not self._is_in(latest):
                    if time.monotonic() >= end:
                        raise PeerUnreachable(
                            f"no view lets in incarnation {self.endpoint.incarnation} of rank {self.rank} within "
                            f"{timeout:.0f} s: the others must call eep.pg.recover_ranks"
                        )
                    time.sleep(_LOOKS_EVERY)
                return self._apply(latest, max(0.1, end - time.monotonic()))
            finally:
                self.endpoint._say(OwnerState.ALONE)

    def state_of(self, rank: int) -> str:
        """``active``; ``waiting`` (a new incarnation asks to be let in); ``starting`` (it is there); or ``absent``."""
        view = self.view
        if rank in view.active:
            return "active"
        newest = self._rendezvous.latest(rank)
        if newest is None or newest <= view.incarnations[rank]:
            return "absent"
        try:
            offers = self._prepare([rank], 0.0)
        except PeerUnreachable:
            return "starting"
        state = offers[rank].state
        _close(offers)
        return "waiting" if state is OwnerState.WAITING else "starting"

    # ---- views, committed elsewhere ----

    def start_alone(self) -> View:
        """Only this rank, in every group."""
        return self.endpoint.start_alone()

    def apply(self, view: View, timeout: float) -> View:
        """Enters a view that a supervisor has committed."""
        with self._changing:
            return self._apply(view, timeout)

    def close(self) -> None:
        """Leaves. Calls that still wait end first."""
        self._watch.close()
        for name in list(self.lanes):
            self.close_lane(name)
        with self.gate.alone(self._end_waits):
            self.endpoint.close()
        # Everybody looks after having left, so that the last one sees nobody.
        if not self._rendezvous.claimed_ranks():
            self._log.clear()
            if self._temporary:
                self._rendezvous.remove()

    # ---- within ----

    def _apply(self, view: View, timeout: float, prepared: dict[int, Offer] | None = None) -> View:
        with self.gate.alone(self._end_waits):
            applied = self.endpoint._peers.apply(view, timeout, prepared)
            size = max(self.size, 1 + max(view.active))
            if size > self.size:
                for lane in self.lanes.values():
                    if lane.ranks == list(range(self.size)):
                        lane.grow(size)
                self.size = size
                for grown in self._on_growth:
                    grown(size)
        self._watch.follow(self.endpoint._peers.processes)
        return applied

    def _end_waits(self) -> None:
        """Whoever waits in this process for what belongs to the present view leaves."""
        if self.view.epoch == ALONE_EPOCH:
            self._votes.poke()  # alone nobody waits but for a message of its own
        else:
            self.endpoint._library.eep_control_revoke(self.endpoint._peers.page, self.view.epoch)

    def _catch_up(self, end: float) -> View:
        latest = self._log.latest()
        if latest is not None and latest.epoch > self.view.epoch:
            return self._enter(latest, end)
        return self.view

    def _enter(self, view: View, end: float) -> View:
        """Enters a view that others have entered before; those of them that have died since are left out."""
        while True:
            try:
                return self._apply(view, min(1.0, max(0.1, end - time.monotonic())))
            except PeerUnreachable:
                alive = self._rendezvous.claimed_ranks()
                dead = [rank for rank in view.active if alive.get(rank) != view.incarnations[rank]]
                if not dead or time.monotonic() >= end:
                    raise
                view = self._log.commit(view.without(dead))

    def _ended(self, rank: int) -> None:
        """The process of a peer is gone. If it went without a word, the epoch is over for everybody."""
        if rank not in self.view.active:
            return
        if self.endpoint._peers.has_left(rank):
            self.endpoint._peers.suspect(rank)
        else:
            self.endpoint.revoke()

    def _vote(self, yes: bool, timeout: float) -> bool:
        ballot = ctypes.c_uint8(yes)
        args = CollectiveArgs(kind=Kind.ALL_REDUCE, element=Element.U8, reduction=Reduction.MIN, bytes=1)
        args.in_ = args.out = ctypes.addressof(ballot)
        self._votes.call("recover_ranks", args, timeout)
        return bool(ballot.value)

    def _prepare(self, ranks: Iterable[int], timeout: float) -> dict[int, Offer]:
        return self.endpoint._peers.prepare(ranks, timeout)

    def _prepare_waiting(self, ranks: set[int], end: float) -> dict[int, Offer]:
        while True:
            offers = self._prepare(ranks, max(0.0, end - time.monotonic()))
            unready = [rank for rank, offer in offers.items() if offer.state is not OwnerState.WAITING]
            stale = [rank for rank, offer in offers.items() if offer.incarnation <= self.view.incarnations[rank]]
            if not unready and not stale:
                return offers
            _close(offers)
            if time.monotonic() >= end:
                raise PeerUnreachable(f"rank {(stale or unready)[0]} does not wait to be let in (eep.pg.join)")
            time.sleep(_LOOKS_EVERY)

    def _is_in(self, view: View) -> bool:
        return self.rank in view.active and view.incarnations[self.rank] == self.endpoint.incarnation

    def _refuse_if_running(self, latest: View | None) -> None:
        if latest is None:
            return
        alive = self._rendezvous.claimed_ranks()
        running = [r for r in latest.active if r != self.rank and alive.get(r) == latest.incarnations[r]]
        if running:
            raise RankInUse(
                f"an instance runs in {self._rendezvous.path} without this rank (epoch {latest.epoch}, rank {running[0]} "
                "lives); start with eep.pg.Options(defer_join=True) and join it, or choose another rendezvous"
            )


def _close(offers: dict[int, Offer]) -> None:
    for offer in offers.values():
        offer.close()
    offers.clear()
