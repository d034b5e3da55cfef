"""The membership side of an endpoint: which peers are mapped, and what the peer table says of them.

A view is applied whole or not at all. First the joiners are mapped, unless :meth:`Peers.prepare` did it before; if that
fails, nothing has changed. Then the table is patched in place. Last, a thread lets go of the mappings of those who left;
only :meth:`Peers.close` waits for it. Callers apply views between steps. Only :meth:`Peers.revoke` may be called at any
time, from any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping

from eep import faults
from eep.abi.collectives import OwnerState
from eep.abi.context import NativeContext
from eep.abi.native import Shape
from eep.abi.peer_table import ALONE_EPOCH, INCARNATIONS, ControlPage, PeerTable
from eep.data_plane.invitation import inviting_view
from eep.data_plane.memory import Memory
from eep.data_plane.memory.descriptor_service import DescriptorServer
from eep.data_plane.memory.exchange import Offer, await_offer, fetch_offer, serve_offer
from eep.data_plane.memory.unmapping import Unmapping
from eep.data_plane.rendezvous import Claim, NoClaim, Rendezvous
from eep.data_plane.table_patch import OwnEntry, patch_table
from eep.data_plane.transport.remote_hosts import LinkedPeer, RemotePeers
from eep.errors import EepError, PeerUnreachable, RankRemoved
from eep.view import View


class Peers:
    """The peers of one rank. ``table`` is the one its kernels read."""

    def __init__(
        self,
        context: NativeContext,
        rendezvous: Rendezvous,
        claim: Claim | NoClaim,
        shape: Shape,
        region: Memory,
        control: Memory,
        remote: RemotePeers | None = None,
    ) -> None:
        """``remote`` has the links to ranks of other hosts, if there are any."""
        self._context = context
        self._rendezvous = rendezvous
        self._claim = claim
        self._shape = shape
        self._region = region
        self._control = control
        self._remote = remote
        self.table: PeerTable = context.table()
        self.view = View.empty(shape.max_ranks)
        self._offers: dict[int, Offer | LinkedPeer] = {}
        self._prepared: dict[int, Offer | LinkedPeer] = {}
        """Mapped ahead of the view that lets them in, or us."""
        # Guards the mappings against a revoke from another thread while they come and go.
        self._mappings = threading.Lock()
        self._unmapping = Unmapping()
        self._listener: DescriptorServer | None = None
        self._listen()

    def claimed(self, claim: Claim) -> None:
        """From now on this process is that life of its rank, and peers may ask for its memory."""
        self._claim = claim
        self._listen()

    def _listen(self) -> None:
        if isinstance(self._claim, Claim):
            self._listener = serve_offer(self._claim, self._shape, self._region, self._control, lambda: self.view)

    def alone(self) -> View:
        """A view of this rank only, in which it may do everything that it will do with the others."""
        if self.view.active:
            raise EepError(f"rank {self._claim.rank} is in a view already; a rank is alone before it joins")
        joining = {self._claim.rank: self._claim.incarnation}
        return self._publish(self.view.joined_by(joining, epoch=ALONE_EPOCH), {})

    def connect(self, ranks: Iterable[int], epoch: int | None, incarnations: Mapping[int, int], timeout: float) -> View:
        """Maps ``ranks`` and lets them in, this rank among them."""
        deadline = time.monotonic() + timeout
        joining = {self._claim.rank: self._claim.incarnation}
        mapped: dict[int, Offer | LinkedPeer] = {}
        try:
            for rank in sorted(set(ranks) - {self._claim.rank}):
                self._check_rank(rank)
                mapped[rank] = self._fetch_when_there(rank, incarnations.get(rank), deadline)
                joining[rank] = mapped[rank].incarnation
            view = self.view.joined_by(joining, epoch=self._last_epoch + 1 if epoch is None else epoch)
            self._check_epoch(view)
        except BaseException:
            for offer in mapped.values():
                offer.close()
            raise
        return self._publish(view, mapped)

    def disconnect(self, ranks: Iterable[int], epoch: int | None) -> View:
        """Goes on without ``ranks``."""
        gone = set(ranks)
        for rank in gone:
            self._check_rank(rank)
        if self._claim.rank in gone:
            raise ValueError(f"rank {self._claim.rank} cannot disconnect itself; close the buffer instead")
        view = self.view.without(gone, epoch=epoch)
        self._check_epoch(view)
        return self._publish(view, {})

    def prepare(
        self, ranks: Iterable[int], timeout: float, remote_lives: Mapping[int, int]
    ) -> Mapping[int, Offer | LinkedPeer]:
        """Maps the newest incarnation of each of ``ranks``, ahead of the :meth:`apply` for which they are kept. Those of
        other hosts get links, as far as ``remote_lives`` says which life of them is meant."""
        deadline = time.monotonic() + timeout
        wanted = sorted(set(ranks) - {self._claim.rank})
        for rank in wanted:
            self._check_rank(rank)
        found: dict[int, Offer | LinkedPeer] = {}
        for rank in wanted:
            life, kept = remote_lives.get(rank), self._prepared.get(rank)
            if kept is None or kept.incarnation != (self._rendezvous.latest(rank) if life is None else life):
                kept = self._keep(self._fetch_newest(rank, life, deadline))
            found[rank] = kept
        return found

    def _fetch_newest(self, rank: int, remote_life: int | None, deadline: float) -> Offer | LinkedPeer:
        if remote_life is None:
            return await_offer(self._rendezvous, rank, None, self._shape, self._region, deadline)
        return self._fetch_when_there(rank, remote_life, deadline)

    def prepare_those_there(self) -> None:
        """As :meth:`prepare`, of every rank that answers now."""
        for rank in self._rendezvous.claimed_ranks():
            with contextlib.suppress(PeerUnreachable):
                self.prepare([rank], 0.0, {})

    def forget_prepared(self) -> None:
        """Lets go of all that was mapped ahead: no view will have it."""
        for offer in self._prepared.values():
            offer.close()
        self._prepared.clear()
        if self._remote is not None:
            self._remote.forget_invited()

    def state_of(self, rank: int) -> OwnerState:
        """What the newest incarnation of ``rank`` says of itself. Raises :class:`PeerUnreachable` if it does not answer."""
        offer = self._fetch_when_there(rank, None, 0.0)
        try:
            return offer.state
        finally:
            offer.close()

    def view_of(self, rank: int) -> View:
        """The view that the newest incarnation of ``rank``, on this host, is in. Raises :class:`PeerUnreachable` if it does
        not answer."""
        with contextlib.closing(
            await_offer(self._rendezvous, rank, None, self._shape, self._region, time.monotonic())
        ) as offer:
            return offer.view

    def apply(self, view: View, timeout: float) -> View:
        """Makes ``view`` the one that the kernels see. Raises :class:`RankRemoved` if this rank is not in it."""
        if view.max_ranks != self._shape.max_ranks:
            raise ValueError(f"a view of {view.max_ranks} ranks does not fit a capacity of {self._shape.max_ranks}")
        self._check_epoch(view)
        me = self._claim.rank
        if me not in view.active or view.incarnations[me] != self._claim.incarnation:
            self._publish(View(view.epoch, (), view.incarnations), {})
            raise RankRemoved(
                f"incarnation {self._claim.incarnation} of rank {me} is not part of epoch {view.epoch}; this process must "
                "end, and may come back only as a new incarnation"
            )
        deadline = time.monotonic() + timeout
        mapped: dict[int, Offer | LinkedPeer] = {}
        for rank in view.active:
            known, wanted = self._offers.get(rank), view.incarnations[rank]
            if rank == me or (known is not None and known.incarnation == wanted):
                continue
            self._shut_out_earlier(rank, wanted)
            prepared = self._prepared.get(rank)
            if prepared is None or prepared.incarnation != wanted:
                prepared = self._keep(self._fetch_when_there(rank, wanted, deadline))
            mapped[rank] = prepared
        faults.at("view.mapped")
        for rank in mapped:
            del self._prepared[rank]
        published = self._publish(view, mapped)
        faults.at("view.patched")
        self.forget_prepared()
        return published

    def adopt(self, timeout: float) -> View:
        """Waits until all members of a view have let this rank in, and applies that view here too."""
        if self._remote is not None:
            raise EepError("an instance of several hosts has a control plane: apply the view that it gives")
        deadline = time.monotonic() + timeout
        me = (self._claim.rank, self._claim.incarnation)
        while True:
            views: dict[int, View] = {}
            for rank, incarnation in self._rendezvous.claimed_ranks().items():
                if rank != me[0]:
                    try:
                        offer = fetch_offer(self._rendezvous, rank, incarnation, self._shape, self._region)
                    except PeerUnreachable:
                        continue  # a rank that is just coming or going has no say
                    views[rank] = offer.view
                    offer.close()
            if (view := inviting_view(*me, views, self._last_epoch)) is not None:
                return self.apply(view, max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise PeerUnreachable(
                    f"no view lets in incarnation {me[1]} of rank {me[0]} yet: the others must connect to it first"
                )
            time.sleep(0.002)

    def revoke(self, epoch: int) -> None:
        """Ends ``epoch`` here and at every peer; all waits in it end at once."""
        with self._mappings:
            self._context.revoke(epoch)

    def set_deadline(self, nanoseconds: int) -> None:
        """How long kernels wait for a source. Also between steps, but no new view: nothing is forgotten."""
        self.table.deadline_ns = nanoseconds
        self._context.publish_deadline()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        with self._mappings:
            self._patch(View.empty(self._shape.max_ranks), {})
        for offer in self._offers.values():
            offer.close()
        self._offers.clear()
        self.forget_prepared()
        self._unmapping.finish()

    @property
    def processes(self) -> dict[tuple[int, int], int]:
        """For every peer in the view, by rank and incarnation, a descriptor that is readable when it has ended: its pidfd, or
        that of its link."""
        with self._mappings:
            return {(offer.rank, offer.incarnation): offer.process for offer in self._offers.values()}

    def says(self, rank: int, state: OwnerState) -> bool:
        """Whether that peer says so of itself."""
        with self._mappings:
            offer = self._offers.get(rank)
            return offer is not None and offer.state is state

    def has_closed(self, rank: int, group: int) -> bool:
        """Whether that peer has that word for one of its lanes."""
        with self._mappings:
            offer = self._offers.get(rank)
            return offer is not None and group in tuple(_page_of(offer).groups)

    @property
    def refused_requests(self) -> int:
        """How many requests for this rank's memory were dropped because they did not verify."""
        return 0 if self._listener is None else self._listener.refused

    def _keep(self, offer: Offer | LinkedPeer) -> Offer | LinkedPeer:
        if (last := self._prepared.pop(offer.rank, None)) is not None:
            last.close()
        self._prepared[offer.rank] = offer
        return offer

    def _fetch_when_there(self, rank: int, incarnation: int | None, deadline: float) -> Offer | LinkedPeer:
        if self._remote is not None and self._remote.has(rank):
            return self._remote.reach(rank, incarnation, self._claim.incarnation, deadline)
        return await_offer(self._rendezvous, rank, incarnation, self._shape, self._region, deadline)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._shape.max_ranks:
            raise ValueError(f"rank {rank} is outside the capacity of {self._shape.max_ranks} ranks")

    @property
    def _last_epoch(self) -> int:
        """That of the last view that this rank shared with others, or might have."""
        return 0 if self.view.epoch == ALONE_EPOCH else self.view.epoch

    def _check_epoch(self, view: View) -> None:
        last = self._last_epoch
        if not last < view.epoch < ALONE_EPOCH:
            raise EepError(f"epochs only grow, up to {ALONE_EPOCH - 1}: epoch {view.epoch} cannot follow epoch {last}")

    def _shut_out_earlier(self, rank: int, incarnation: int) -> None:
        """A link must be closed before another life gets its slot. A view that has this one says that the other is over."""
        for peers in (self._offers, self._prepared):
            known = peers.get(rank)
            if not isinstance(known, LinkedPeer) or known.incarnation == incarnation:
                continue
            if (incarnation - known.incarnation) % INCARNATIONS == 0:
                del peers[rank]
                known.close()

    def _publish(self, view: View, mapped: Mapping[int, Offer | LinkedPeer]) -> View:
        with self._mappings:
            active = {*view.active}
            left = [self._offers.pop(rank) for rank in list(self._offers) if rank not in active or rank in mapped]
            # Before suspects are forgotten: what a link that ends says of its rank is of the epoch before.
            for peer in left:
                if isinstance(peer, LinkedPeer):
                    peer.close()
            self._offers.update(mapped)
            self._patch(view, self._offers)
            self._context.publish_table()
            self.view = view
        self._unmapping.begin([peer for peer in left if isinstance(peer, Offer)], self._claim.rank)
        return view

    def _patch(self, view: View, peers: Mapping[int, Offer | LinkedPeer]) -> None:
        own = OwnEntry(self._claim.rank, self._region.address, self._control.address)
        patch_table(self.table, view, own, peers)


def _page_of(offer: Offer | LinkedPeer) -> ControlPage:
    """Where that peer says what it is up to."""
    return offer.page if isinstance(offer, LinkedPeer) else ControlPage.from_address(offer.control.address)
