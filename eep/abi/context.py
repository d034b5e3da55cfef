"""A context of the native library: the calls that one rank's memory serves, each checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from eep.abi.collectives import CollectiveArgs, Group, MessageHeader, OwnerState
from eep.abi.native import (
    BlockStamps,
    CombineRecvArgs,
    CombineSendArgs,
    DispatchRecvArgs,
    DispatchSendArgs,
    NativeLibrary,
    Shape,
    check,
)
from eep.abi.peer_table import ControlPage, PeerTable, RankSet

Stream = int | None
"""A CUDA stream; None on a CPU."""


class NativeContext:
    """An ``eep_context``. Every method raises what a negative return code stands for; none may be called after
    :meth:`destroy`."""

    def __init__(self, library: NativeLibrary, shape: Shape, rank: int, region: int, control: int) -> None:
        """``region`` and ``control`` are addresses; that memory must outlive the context."""
        self._library = library
        self._handle = ctypes.c_void_p()
        self._check(library.eep_create(shape, rank, region, control, self._handle))
        self.page = ControlPage.from_address(control)
        """This rank's own control page."""

    def destroy(self) -> None:
        self._library.eep_destroy(self._handle)

    # ---- the peer table ----

    def table(self) -> PeerTable:
        """The host's copy of the table, patched between steps only."""
        return self._library.eep_table(self._handle).contents

    def publish_table(self) -> None:
        """Shows the kernels the table as it was patched, and forgets what they found wrong in the last view."""
        self._check(self._library.eep_publish_table(self._handle))

    def publish_deadline(self) -> None:
        self._check(self._library.eep_publish_deadline(self._handle))

    def revoke(self, epoch: int) -> None:
        """Ends ``epoch`` for this rank and for every peer in its table."""
        self._library.eep_revoke(self._handle, epoch)

    # ---- this rank's control page ----

    def announce(self, state: OwnerState) -> None:
        """Says what this rank is up to, to all who map its control page."""
        self._library.eep_control_state(self.page, state)

    def suspect(self, ranks: int) -> None:
        """This rank will not wait for ``ranks`` (a bit mask) again in its current epoch."""
        self._library.eep_control_suspect(self.page, RankSet.of(ranks))

    def end_waits(self, epoch: int) -> None:
        """Ends ``epoch`` and all before it for this rank alone."""
        self._library.eep_control_revoke(self.page, epoch)

    # ---- tokens ----

    def dispatch(self, send: DispatchSendArgs, receive: DispatchRecvArgs, stream: Stream) -> None:
        self._check(self._library.eep_dispatch(self._handle, send, receive, stream))

    def dispatch_send(self, args: DispatchSendArgs, stream: Stream) -> None:
        self._check(self._library.eep_dispatch_send(self._handle, args, stream))

    def dispatch_recv(self, args: DispatchRecvArgs, stream: Stream) -> None:
        self._check(self._library.eep_dispatch_recv(self._handle, args, stream))

    def combine(self, send: CombineSendArgs, receive: CombineRecvArgs, stream: Stream) -> None:
        self._check(self._library.eep_combine(self._handle, send, receive, stream))

    def combine_send(self, args: CombineSendArgs, stream: Stream) -> None:
        self._check(self._library.eep_combine_send(self._handle, args, stream))

    def combine_recv(self, args: CombineRecvArgs, stream: Stream) -> None:
        self._check(self._library.eep_combine_recv(self._handle, args, stream))

    def barrier(self, deadline_ns: int, stream: Stream) -> None:
        self._check(self._library.eep_barrier(self._handle, deadline_ns, stream))

    # ---- process groups ----

    def open_lane(self, identity: int, ranks: Sequence[int]) -> int:
        """The number of the lane that serves the group ``identity`` of ``ranks``. A group that is opened again with more
        members keeps its lane."""
        group, lane = Group(id=identity, size=len(ranks)), ctypes.c_uint32()
        group.ranks[: len(ranks)] = list(ranks)
        self._check(self._library.eep_lane_open(self._handle, group, lane))
        return lane.value

    def close_lane(self, lane: int) -> None:
        self._check(self._library.eep_lane_close(self._handle, lane))

    def collective(self, args: CollectiveArgs, stream: Stream = None) -> None:
        self._check(self._library.eep_collective(self._handle, args, stream))

    def send(self, lane: int, to: int, tag: int, address: int | None, size: int, deadline_ns: int) -> bool:
        """Whether the message went out whole."""
        done = ctypes.c_uint32()
        self._check(self._library.eep_send(self._handle, lane, to, tag, address, size, deadline_ns, done))
        return bool(done.value)

    def probe(self, lane: int, sources: int, pokes: int, deadline_ns: int) -> MessageHeader | None:
        """The next message of one of ``sources`` (a bit mask), which stays where it is; None if the wait ended first."""
        message = MessageHeader()
        self._check(self._library.eep_probe(self._handle, lane, RankSet.of(sources), pokes, deadline_ns, message))
        return message if message.arrived else None

    def receive(self, lane: int, source: int, address: int | None, size: int, deadline_ns: int) -> bool:
        """Takes the message that :meth:`probe` showed. Whether all of it came."""
        done = ctypes.c_uint32()
        self._check(self._library.eep_recv(self._handle, lane, source, address, size, deadline_ns, done))
        return bool(done.value)

    def pokes(self) -> int:
        return self._library.eep_pokes(self._handle)

    def poke(self) -> None:
        """Ends the waits of :meth:`probe`."""
        self._library.eep_poke(self._handle)

    # ---- a GPU ----

    def tune(self, blocks: int, bench: int = 0) -> None:
        """How many thread blocks a kernel takes (0: as before), and what benchmarks ask for."""
        self._check(self._library.eep_tune(self._handle, blocks, bench))

    def share_gpu(self) -> None:
        """Other ranks run on this GPU: only a few thread blocks wait from now on."""
        self._check(self._library.eep_share_gpu(self._handle))

    def overlap(self) -> None:
        """From now on the next kernel may take its place while one of ours ends."""
        self._check(self._library.eep_overlap(self._handle))

    def span_hosts(self, landing: int, remote: int) -> None:
        """Ranks of the bit mask ``remote`` may be on other hosts. ``landing`` is the address of host memory that stands for
        the region towards them; it must outlive the context."""
        self._check(self._library.eep_span_hosts(self._handle, landing, RankSet.of(remote)))

    def show_mirror(self, mirror: int, own_incarnation: int) -> None:
        """Lets kernels reach a mirror, until :meth:`hide_mirror`."""
        self._check(self._library.eep_show_mirror(self._handle, mirror, own_incarnation))

    def hide_mirror(self, mirror: int) -> None:
        self._check(self._library.eep_hide_mirror(self._handle, mirror))

    def stamps(self, blocks: int) -> list[BlockStamps]:
        """When blocks passed their stations: ``STAMPED_BLOCKS`` of the last dispatch, and behind them those of the last
        combine; the first ``blocks`` of all these."""
        stamps = (BlockStamps * blocks)()
        self._check(self._library.eep_stamps(self._handle, stamps, blocks))
        return list(stamps)

    def _check(self, code: int) -> None:
        check(self._library, code)
