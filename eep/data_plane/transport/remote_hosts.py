"""Ranks on other hosts: which they are, and how this rank comes to have a link and a mirror for each.

The two ends of a link announce themselves to each other in a registry, which is the store of the control plane, or a
directory that all can reach. An end takes an address from no other place.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

from eep.abi.collectives import OwnerState
from eep.abi.hosts import LinkOffer, RemotePeer
from eep.abi.native import NativeLibrary, Shape
from eep.abi.peer_table import ControlPage
from eep.abi.proxy import NativeProxy
from eep.data_plane.memory import Memory
from eep.data_plane.memory.exchange import CONTROL_BYTES
from eep.data_plane.memory.shm import SharedMemory
from eep.data_plane.transport.landing import Landing
from eep.data_plane.transport.link_records import (
    KEY_BYTES,
    NONCE_BYTES,
    BadLinkRecord,
    LinkEnd,
    LinkRecord,
    link_name,
    open_link,
    seal_link,
    secret_of,
)
from eep.errors import EepError, PeerUnreachable

_PAUSE_S = 0.002
_WITHDRAWN_WITHIN_S = 2.0
_FAREWELL_WITHIN_S = 2.0


class LinkRegistry(Protocol):
    """Where ends of links are announced. The registries of :mod:`eep.experts.registry` are such."""

    def publish(self, key: str, value: bytes) -> None: ...
    def withdraw(self, key: str) -> None: ...
    def scan(self, prefix: str) -> dict[str, bytes]: ...


@dataclass(frozen=True, slots=True)
class RemoteHosts:
    """Checked when it is made: ``ValueError`` says what is wrong."""

    ranks: Container[int]
    """The ranks that run on other hosts. It may change: a rank may come back on another one."""
    address: str
    """That of this host, at which the others reach it: it is bound to, and no other."""
    registry: LinkRegistry
    key: bytes
    """Of the job, the same on every host."""
    provider: str = "tcp"
    """Of libfabric."""

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"the key of the job must have {KEY_BYTES} bytes, got {len(self.key)}")
        if self.address in ("", "0.0.0.0", "::"):
            raise ValueError(f"name the address of this host that the others reach it at, not {self.address!r}")


@dataclass(frozen=True, slots=True)
class LinkedPeer:
    """One life of a rank on another host: the mirror that stands for its region, and what closes its link."""

    rank: int
    incarnation: int
    region: Memory
    control: Memory
    page: ControlPage
    """What it says of itself, as the proxy has heard it. It lies behind the mirror."""
    process: int
    """A descriptor that becomes readable when the link ends: all that shows here of the end of the process."""
    dismiss: Callable[[], None]

    @property
    def state(self) -> OwnerState:
        return OwnerState(self.page.state)

    def close(self) -> None:
        """Shuts the peer out. Nothing that it sends from now on is written anywhere."""
        self.dismiss()
        os.close(self.process)
        self.region.close()


@dataclass(slots=True)
class _Invitation:
    """A link that one end has opened."""

    mirror: Memory
    link: int
    name: str
    record: bytes
    is_announced: bool = False
    is_connected: bool = False


class RemotePeers:
    """The links of one rank. Not for several threads at once."""

    def __init__(
        self,
        hosts: RemoteHosts,
        library: NativeLibrary,
        shape: Shape,
        rank: int,
        region: Memory,
        control: Memory,
        landing: Landing | None = None,
    ) -> None:
        """``landing`` is that of a rank on a GPU."""
        self._hosts, self._shape, self._rank, self._size = hosts, shape, rank, region.size
        self._library, self._service = library, "links" if shape.channels else "lanes"
        self._landing = landing
        if landing is not None:
            # The process groups of a rank have links for the tensors of each kind of device.
            region, self._service = landing.memory, f"{self._service}-cuda"
        self._invited: dict[tuple[LinkEnd, LinkEnd], _Invitation] = {}
        self._withdrawing: dict[str, threading.Thread] = {}
        self._waits = SharedMemory.create(f"eep-proxy-{rank}", CONTROL_BYTES)
        try:
            self._proxy = NativeProxy(
                library,
                shape,
                rank,
                region.address,
                control.address,
                self._waits.address,
                hosts.provider,
                hosts.address,
            )
        except BaseException:
            self._waits.close()
            raise
        if landing is not None:
            self._proxy.watch()

    def has(self, rank: int) -> bool:
        return rank in self._hosts.ranks

    def reach(self, rank: int, incarnation: int | None, own_incarnation: int, deadline: float) -> LinkedPeer:
        """A link to one life of ``rank``, up until ``deadline`` (of ``time.monotonic``), or :class:`PeerUnreachable`. What
        was begun is kept for another try."""
        if incarnation is None:
            raise ValueError(f"rank {rank} is on another host: say which incarnation of it is meant")
        if self._landing is not None:
            self._landing.check(rank)
        own, peer = LinkEnd(self._rank, own_incarnation), LinkEnd(rank, incarnation)
        invitation = self._invited.get((own, peer)) or self._invite(own, peer)
        while True:
            problem = self._problem(own, peer, invitation)
            if not problem:
                break
            if time.monotonic() >= deadline:
                raise PeerUnreachable(f"rank {rank} (incarnation {incarnation}) on another host: {problem}")
            time.sleep(_PAUSE_S)
        del self._invited[own, peer]
        page = ControlPage.from_address(invitation.mirror.address + self._size)
        process = os.dup(self._proxy.ended(invitation.link))
        return LinkedPeer(
            rank, incarnation, invitation.mirror, self._waits, page, process, lambda: self._dismiss(invitation)
        )

    def announce(self, state: OwnerState) -> None:
        """Has the proxy tell what this rank says of itself. Where it leaves, waits a while until all peers know: they have
        got what it owed them by then, and the end of its links is no surprise to them."""
        self._library.eep_control_state(ControlPage.from_address(self._waits.address), state)
        if state is OwnerState.LEFT:
            self._proxy.take_leave(_FAREWELL_WITHIN_S)

    def forget_invited(self) -> None:
        """Closes the links that no view has."""
        for invitation in self._invited.values():
            self._dismiss(invitation)
            invitation.mirror.close()
        self._invited.clear()

    def close(self) -> None:
        self.forget_invited()
        self._proxy.stop()
        self._waits.close()
        for thread in self._withdrawing.values():
            thread.join(_WITHDRAWN_WITHIN_S)

    def _invite(self, own: LinkEnd, peer: LinkEnd) -> _Invitation:
        name, nonce = link_name(own, peer, self._service), os.urandom(NONCE_BYTES)
        mirror = SharedMemory.placeholder(self._size + CONTROL_BYTES)
        try:
            entry = RemotePeer(mirror.address, peer.rank, peer.incarnation, own.incarnation)
            if self._landing is not None:
                self._landing.show(mirror.address, own.incarnation)
            try:
                link, offer = self._proxy.invite(entry, secret_of(self._hosts.key, name, nonce))
            except BaseException:
                self._hide(mirror)
                raise
        except BaseException:
            mirror.close()
            raise
        record = LinkRecord(nonce, bytes(self._shape), bytes(offer))
        invitation = _Invitation(mirror, link, name, seal_link(self._hosts.key, name, record))
        self._invited[own, peer] = invitation
        return invitation

    def _problem(self, own: LinkEnd, peer: LinkEnd, invitation: _Invitation) -> str:
        """What is missing until the link is up."""
        if not invitation.is_announced and (problem := self._announce(invitation)):
            return problem
        try:
            if not invitation.is_connected:
                name = link_name(peer, own, self._service)
                if (value := self._hosts.registry.scan(name).get(name)) is None:
                    return "it has not announced itself"
                record = open_link(self._hosts.key, name, value)
                if record.shape != bytes(self._shape):
                    return "its buffer was made with other sizes or types; all ranks must agree"
                offer = LinkOffer.from_buffer_copy(record.offer)
                self._proxy.connect(invitation.link, offer, secret_of(self._hosts.key, name, record.nonce))
                invitation.is_connected = True
            return "" if self._proxy.is_up(invitation.link) else "it does not answer"
        except BadLinkRecord as error:
            return str(error)
        except (EepError, ValueError) as error:
            # It is never mended: the next try begins with a link of its own.
            self._dismiss(invitation)
            invitation.mirror.close()
            del self._invited[own, peer]
            raise PeerUnreachable(
                f"rank {peer.rank} (incarnation {peer.incarnation}) on another host: {error}"
            ) from error

    def _announce(self, invitation: _Invitation) -> str:
        """What went wrong, or nothing."""
        # An earlier link between the same two lives had the same name: its end must not take this record away.
        if (earlier := self._withdrawing.get(invitation.name)) is not None:
            earlier.join(_WITHDRAWN_WITHIN_S)
            if earlier.is_alive():
                return "the store does not answer"
        try:
            self._hosts.registry.publish(invitation.name, invitation.record)
        except EepError as error:
            return f"this rank could not announce itself to it: {error}"
        invitation.is_announced = True
        return ""

    def _hide(self, mirror: Memory) -> None:
        if self._landing is not None:
            self._landing.hide(mirror.address)

    def _dismiss(self, invitation: _Invitation) -> None:
        self._hide(invitation.mirror)  # while the link can still tell kernels that the peer is gone
        self._proxy.dismiss(invitation.link)
        if invitation.is_announced:
            # Beside the next steps: a store that does not answer must not hold up a view.
            withdraw = threading.Thread(
                target=self._hosts.registry.withdraw,
                args=(invitation.name,),
                name=f"eep-withdraw-{self._rank}",
                daemon=True,
            )
            withdraw.start()
            self._withdrawing = {name: each for name, each in self._withdrawing.items() if each.is_alive()}
            self._withdrawing[invitation.name] = withdraw
