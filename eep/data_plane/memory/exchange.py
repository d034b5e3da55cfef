"""The memory that ranks offer each other: the descriptors of a rank's region and control page, and its view.

The answer has a fixed size and a plain structure; nothing in it is parsed or dereferenced. All of it is checked before any of
it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from eep.abi.collectives import OwnerState
from eep.abi.native import Shape
from eep.abi.peer_table import MAX_RANKS, ControlPage, RankSet, ranks_of
from eep.data_plane.memory import Memory, adopt, kind_of
from eep.data_plane.memory.descriptor_service import DescriptorProtocol, DescriptorServer, ask_for_descriptors
from eep.data_plane.memory.shm import SharedMemory
from eep.data_plane.rendezvous import Claim, Rendezvous, socket_path
from eep.errors import PeerUnreachable
from eep.view import View

CONTROL_BYTES = 4096
_HELLO = b"EEP-HELLO-2\n"
_ANSWER = struct.Struct(f"<12sIIQ{ctypes.sizeof(RankSet)}s{ctypes.sizeof(Shape)}s{MAX_RANKS}i")
_PROTOCOL = DescriptorProtocol(_HELLO, _ANSWER.size, descriptors=2)
_PAUSE_S = 0.002

assert ctypes.sizeof(ControlPage) <= CONTROL_BYTES


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's memory, mapped here, its process, and the view it had when it answered."""

    rank: int
    incarnation: int
    region: Memory
    control: Memory
    view: View
    process: int
    """A pidfd: readable once the peer is dead."""

    @property
    def state(self) -> OwnerState:
        """What the peer says of itself now."""
        said = ControlPage.from_address(self.control.address).state
        return OwnerState(said) if said in tuple(OwnerState) else OwnerState.ALONE

    def close(self) -> None:
        self.region.close()
        self.control.close()
        os.close(self.process)


def serve_offer(
    claim: Claim, shape: Shape, region: Memory, control: Memory, view: Callable[[], View]
) -> DescriptorServer:
    """Offers the memory of this rank to its peers, with the view that ``view`` returns when a peer asks."""

    def answer() -> bytes:
        now = view()
        padded = [*now.incarnations, *[-1] * (MAX_RANKS - now.max_ranks)]
        active = bytes(RankSet.of(sum(1 << rank for rank in now.active)))
        return _ANSWER.pack(_HELLO, claim.rank, claim.incarnation, now.epoch, active, bytes(shape), *padded)

    return DescriptorServer(claim.socket_path, _PROTOCOL, (region.fd, control.fd), answer)


def fetch_offer(rendezvous: Rendezvous, rank: int, incarnation: int, shape: Shape, region: Memory) -> Offer:
    """Maps the memory of one incarnation of ``rank``, of the kind and size of ours, ``region``.

    Raises :class:`PeerUnreachable` if the peer does not give it now.
    """
    peer = f"rank {rank} (incarnation {incarnation})"
    answer = ask_for_descriptors(socket_path(rendezvous.path, rank, incarnation), _PROTOCOL, peer)
    try:
        view = _checked_view(answer.content, rank, incarnation, shape)
    except BaseException:
        answer.close()
        raise
    their_region, their_control = answer.descriptors
    # adopt() closes the descriptor that it does not take over.
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, answer.process)
        with contextlib.ExitStack() as unadopted:
            unadopted.callback(os.close, their_control)
            mapped = adopt(kind_of(region), [their_region], region.size)
            stack.callback(mapped.close)
            unadopted.pop_all()
        control = SharedMemory.adopt(their_control, CONTROL_BYTES)
        stack.pop_all()
    return Offer(rank, incarnation, mapped, control, view, answer.process)


def await_offer(
    rendezvous: Rendezvous,
    rank: int,
    incarnation: int | None,
    shape: Shape,
    region: Memory,
    deadline: float,
) -> Offer:
    """As :func:`fetch_offer`, waiting until ``deadline`` (of ``time.monotonic``) for the rank to appear."""
    while True:
        wanted = rendezvous.latest(rank) if incarnation is None else incarnation
        problem = f"rank {rank} is not there"
        if wanted is not None:
            try:
                return fetch_offer(rendezvous, rank, wanted, shape, region)
            except PeerUnreachable as error:
                problem = str(error)
        if time.monotonic() >= deadline:
            raise PeerUnreachable(f"{problem}; waited for it in {rendezvous.path} until the timeout", (rank,))
        time.sleep(_PAUSE_S)


def _checked_view(answer: bytes, rank: int, incarnation: int, shape: Shape) -> View:
    """The view that the peer told of, once the whole answer is known to fit."""
    hello, their_rank, their_incarnation, epoch, active, their_shape, *incarnations = _ANSWER.unpack(answer)
    if hello != _HELLO or (their_rank, their_incarnation) != (rank, incarnation):
        raise PeerUnreachable(
            f"the process at the socket of rank {rank} (incarnation {incarnation}) answered as rank {their_rank} "
            f"(incarnation {their_incarnation}): it is not that rank, or speaks another protocol"
        )
    if their_shape != bytes(shape):
        theirs = Shape.from_buffer_copy(their_shape)
        differ = [
            f"{name} is {getattr(theirs, name)} there and {getattr(shape, name)} here"
            for name in Shape.NAMES
            if getattr(theirs, name) != getattr(shape, name)
        ]
        raise ValueError(f"the buffer of rank {rank} was made differently: {'; '.join(differ)}")
    try:
        return View(epoch, ranks_of(RankSet.from_buffer_copy(active).mask), tuple(incarnations[: shape.max_ranks]))
    except ValueError as error:
        raise PeerUnreachable(f"rank {rank} told of a view that does not exist: {error}") from error
