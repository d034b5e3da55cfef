"""The C functions of ``eep_cuda/include/eep/eep.h`` as Python calls them: their typed face, and their ctypes prototypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Array, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Protocol

from eep.abi.collectives import CollectiveArgs, Group, MessageHeader
from eep.abi.hosts import Area, LinkOffer, LinkSecret, RemotePeer, Signal
from eep.abi.peer_table import ControlPage, PeerTable, RankSet, Snapshot
from eep.abi.structures import (
    AbiField,
    BlockStamps,
    CombineRecvArgs,
    CombineSendArgs,
    DispatchRecvArgs,
    DispatchSendArgs,
    PageCopyArgs,
    RegionLayout,
    Shape,
)

if TYPE_CHECKING:
    Page = ControlPage
    Pointers = Array[c_void_p]
    Sizes = Array[c_uint64]
    Stamps = Array[BlockStamps]
    Areas = Array[Area]
    Signals = Array[Signal]


class NativeLibrary(Protocol):
    """A backend as Python calls it: one method per C function. ctypes passes a structure or a number by reference where
    the function takes a pointer to it; an address or a stream is an ``int``, and null is None. An ``int`` that comes back
    from a function that can fail is a code for :func:`check`."""

    # ---- life of a context ----
    def eep_abi_version(self) -> int: ...
    def eep_last_error(self) -> bytes: ...
    def eep_region_layout_compute(self, shape: Shape, out: RegionLayout, /) -> int: ...
    def eep_create(self, shape: Shape, rank: int, region: int, control: int, out: c_void_p, /) -> int: ...
    def eep_destroy(self, context: c_void_p, /) -> None: ...
    def eep_tune(self, context: c_void_p, blocks: int, bench: int, /) -> int: ...
    def eep_share_gpu(self, context: c_void_p, /) -> int: ...
    def eep_overlap(self, context: c_void_p, /) -> int: ...
    def eep_stamps(self, context: c_void_p, stamps: Stamps, blocks: int, /) -> int: ...
    def eep_table(self, context: c_void_p, /) -> ctypes._Pointer[PeerTable]: ...
    def eep_publish_table(self, context: c_void_p, /) -> int: ...
    def eep_publish_deadline(self, context: c_void_p, /) -> int: ...
    def eep_snapshot_of(self, context: c_void_p, channel: int, /) -> ctypes._Pointer[Snapshot]: ...

    # ---- dispatch, combine, barrier ----
    def eep_dispatch_send(self, context: c_void_p, args: DispatchSendArgs, stream: int | None, /) -> int: ...
    def eep_dispatch_recv(self, context: c_void_p, args: DispatchRecvArgs, stream: int | None, /) -> int: ...
    def eep_combine_send(self, context: c_void_p, args: CombineSendArgs, stream: int | None, /) -> int: ...
    def eep_combine_recv(self, context: c_void_p, args: CombineRecvArgs, stream: int | None, /) -> int: ...
    def eep_dispatch(
        self, context: c_void_p, send: DispatchSendArgs, recv: DispatchRecvArgs, stream: int | None, /
    ) -> int: ...
    def eep_combine(
        self, context: c_void_p, send: CombineSendArgs, recv: CombineRecvArgs, stream: int | None, /
    ) -> int: ...
    def eep_barrier(self, context: c_void_p, deadline_ns: int, stream: int | None, /) -> int: ...

    # ---- process groups ----
    def eep_lane_open(self, context: c_void_p, group: Group, lane: c_uint32, /) -> int: ...
    def eep_lane_close(self, context: c_void_p, lane: int, /) -> int: ...
    def eep_collective(self, context: c_void_p, args: CollectiveArgs, stream: int | None, /) -> int: ...
    def eep_send(
        self,
        context: c_void_p,
        lane: int,
        to: int,
        tag: int,
        data: int | None,
        size: int,
        deadline_ns: int,
        done: c_uint32,
        /,
    ) -> int: ...
    def eep_probe(
        self, context: c_void_p, lane: int, sources: RankSet, pokes: int, deadline_ns: int, message: MessageHeader, /
    ) -> int: ...
    def eep_pokes(self, context: c_void_p, /) -> int: ...
    def eep_poke(self, context: c_void_p, /) -> None: ...
    def eep_recv(
        self,
        context: c_void_p,
        lane: int,
        source: int,
        data: int | None,
        size: int,
        deadline_ns: int,
        done: c_uint32,
        /,
    ) -> int: ...

    # ---- copies ----
    def eep_copy_batch(
        self, count: int, to: Pointers, source: Pointers, sizes: Sizes, stream: int | None, /
    ) -> int: ...
    def eep_copy_rows(
        self,
        arrays: int,
        to: Pointers,
        source: Pointers,
        row_bytes: Sizes,
        rows: int,
        to_rows: int,
        source_rows: int,
        stream: int | None,
        /,
    ) -> int: ...
    def eep_copy_pages(self, copy: PageCopyArgs, count: int, pages: int, stream: int | None, /) -> int: ...

    # ---- control pages ----
    def eep_control_state(self, page: Page, state: int, /) -> None: ...
    def eep_control_revoke(self, page: Page, epoch: int, /) -> None: ...
    def eep_control_suspect(self, page: Page, ranks: RankSet, /) -> None: ...
    def eep_revoke(self, context: c_void_p, epoch: int, /) -> None: ...

    # ---- links between hosts ----
    def eep_hosts_open(self, provider: bytes, address: bytes, out: c_void_p, /) -> int: ...
    def eep_hosts_close(self, hosts: c_void_p, /) -> None: ...
    def eep_link_open(self, hosts: c_void_p, areas: Areas, count: int, secret: LinkSecret, out: c_void_p, /) -> int: ...
    def eep_link_offered(self, link: c_void_p, out: LinkOffer, /) -> None: ...
    def eep_link_connect(self, link: c_void_p, peer: LinkOffer, secret: LinkSecret, /) -> int: ...
    def eep_link_put(
        self, link: c_void_p, area: int, offset: int, source: int, size: int, done: c_uint32, /
    ) -> int: ...
    def eep_link_signal(self, link: c_void_p, signal: Signal, done: c_uint32, /) -> int: ...
    def eep_link_unread(self, link: c_void_p, /) -> int: ...
    def eep_link_progress(self, link: c_void_p, signals: Signals, most: int, count: c_uint32, /) -> int: ...
    def eep_link_refused(self, link: c_void_p, /) -> int: ...
    def eep_link_drain(self, link: c_void_p, deadline_ns: int, done: c_uint32, /) -> int: ...
    def eep_link_close(self, link: c_void_p, /) -> None: ...

    # ---- the proxy ----
    def eep_proxy_start(
        self,
        shape: Shape,
        rank: int,
        region: int,
        control: int,
        waits: int,
        provider: bytes,
        address: bytes,
        out: c_void_p,
        /,
    ) -> int: ...
    def eep_proxy_stop(self, proxy: c_void_p, /) -> None: ...
    def eep_proxy_invite(
        self, proxy: c_void_p, peer: RemotePeer, secret: LinkSecret, offer: LinkOffer, link: c_uint32, /
    ) -> int: ...
    def eep_proxy_connect(self, proxy: c_void_p, link: int, offer: LinkOffer, secret: LinkSecret, /) -> int: ...
    def eep_proxy_is_up(self, proxy: c_void_p, link: int, is_up: c_uint32, /) -> int: ...
    def eep_proxy_dismiss(self, proxy: c_void_p, link: int, /) -> int: ...
    def eep_proxy_ended(self, proxy: c_void_p, link: int, descriptor: c_int, /) -> int: ...
    def eep_proxy_take_leave(self, proxy: c_void_p, deadline_ns: int, /) -> int: ...
    def eep_proxy_watch(self, proxy: c_void_p, /) -> None: ...

    # ---- ranks on a GPU with peers on other hosts ----
    def eep_span_hosts(self, context: c_void_p, landing: int, remote: RankSet, /) -> int: ...
    def eep_show_mirror(self, context: c_void_p, mirror: int, own_incarnation: int, /) -> int: ...
    def eep_hide_mirror(self, context: c_void_p, mirror: int, /) -> int: ...

    # ---- fault points, and the layout of the structures ----
    def eep_fault_count(self) -> int: ...
    def eep_fault_name(self, point: int, /) -> bytes: ...
    def eep_fault_arm(self, point: int, action: int, skip: int, amount: int, /) -> int: ...
    def eep_fault_notify(self, fired: Any, /) -> None: ...
    def eep_abi_fields(self, count: c_uint32, /) -> ctypes._Pointer[AbiField]: ...


PROTOTYPES = {
    "eep_abi_version": (c_uint32, ()),
    "eep_last_error": (c_char_p, ()),
    "eep_region_layout_compute": (c_int, (POINTER(Shape), POINTER(RegionLayout))),
    "eep_create": (c_int, (POINTER(Shape), c_uint32, c_void_p, c_void_p, POINTER(c_void_p))),
    "eep_destroy": (None, (c_void_p,)),
    "eep_tune": (c_int, (c_void_p, c_uint32, c_uint32)),
    "eep_share_gpu": (c_int, (c_void_p,)),
    "eep_overlap": (c_int, (c_void_p,)),
    "eep_stamps": (c_int, (c_void_p, POINTER(BlockStamps), c_uint32)),
    "eep_table": (POINTER(PeerTable), (c_void_p,)),
    "eep_publish_table": (c_int, (c_void_p,)),
    "eep_publish_deadline": (c_int, (c_void_p,)),
    "eep_snapshot_of": (POINTER(Snapshot), (c_void_p, c_uint32)),
    "eep_dispatch_send": (c_int, (c_void_p, POINTER(DispatchSendArgs), c_void_p)),
    "eep_dispatch_recv": (c_int, (c_void_p, POINTER(DispatchRecvArgs), c_void_p)),
    "eep_combine_send": (c_int, (c_void_p, POINTER(CombineSendArgs), c_void_p)),
    "eep_combine_recv": (c_int, (c_void_p, POINTER(CombineRecvArgs), c_void_p)),
    "eep_dispatch": (c_int, (c_void_p, POINTER(DispatchSendArgs), POINTER(DispatchRecvArgs), c_void_p)),
    "eep_combine": (c_int, (c_void_p, POINTER(CombineSendArgs), POINTER(CombineRecvArgs), c_void_p)),
    "eep_barrier": (c_int, (c_void_p, c_uint64, c_void_p)),
    "eep_lane_open": (c_int, (c_void_p, POINTER(Group), POINTER(c_uint32))),
    "eep_lane_close": (c_int, (c_void_p, c_uint32)),
    "eep_collective": (c_int, (c_void_p, POINTER(CollectiveArgs), c_void_p)),
    "eep_send": (c_int, (c_void_p, c_uint32, c_uint32, c_uint64, c_void_p, c_uint64, c_uint64, POINTER(c_uint32))),
    "eep_probe": (c_int, (c_void_p, c_uint32, POINTER(RankSet), c_uint32, c_uint64, POINTER(MessageHeader))),
    "eep_pokes": (c_uint32, (c_void_p,)),
    "eep_poke": (None, (c_void_p,)),
    "eep_recv": (c_int, (c_void_p, c_uint32, c_uint32, c_void_p, c_uint64, c_uint64, POINTER(c_uint32))),
    "eep_copy_batch": (
        c_int,
        (c_uint32, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_uint64), c_void_p),
    ),
    "eep_copy_rows": (
        c_int,
        (
            *(c_uint32, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_uint64)),
            *(c_uint64, c_void_p, c_void_p, c_void_p),
        ),
    ),
    "eep_copy_pages": (c_int, (POINTER(PageCopyArgs), c_uint32, c_void_p, c_void_p)),
    "eep_control_state": (None, (POINTER(ControlPage), c_uint64)),
    "eep_control_revoke": (None, (POINTER(ControlPage), c_uint64)),
    "eep_control_suspect": (None, (POINTER(ControlPage), POINTER(RankSet))),
    "eep_revoke": (None, (c_void_p, c_uint64)),
    "eep_hosts_open": (c_int, (c_char_p, c_char_p, POINTER(c_void_p))),
    "eep_hosts_close": (None, (c_void_p,)),
    "eep_link_open": (c_int, (c_void_p, POINTER(Area), c_uint32, POINTER(LinkSecret), POINTER(c_void_p))),
    "eep_link_offered": (None, (c_void_p, POINTER(LinkOffer))),
    "eep_link_connect": (c_int, (c_void_p, POINTER(LinkOffer), POINTER(LinkSecret))),
    "eep_link_put": (c_int, (c_void_p, c_uint32, c_uint64, c_void_p, c_uint64, POINTER(c_uint32))),
    "eep_link_signal": (c_int, (c_void_p, POINTER(Signal), POINTER(c_uint32))),
    "eep_link_unread": (c_uint32, (c_void_p,)),
    "eep_link_progress": (c_int, (c_void_p, POINTER(Signal), c_uint32, POINTER(c_uint32))),
    "eep_link_refused": (c_uint64, (c_void_p,)),
    "eep_link_drain": (c_int, (c_void_p, c_uint64, POINTER(c_uint32))),
    "eep_link_close": (None, (c_void_p,)),
    "eep_proxy_start": (
        c_int,
        (POINTER(Shape), c_uint32, c_void_p, c_void_p, c_void_p, c_char_p, c_char_p, POINTER(c_void_p)),
    ),
    "eep_proxy_stop": (None, (c_void_p,)),
    "eep_proxy_invite": (
        c_int,
        (c_void_p, POINTER(RemotePeer), POINTER(LinkSecret), POINTER(LinkOffer), POINTER(c_uint32)),
    ),
    "eep_proxy_connect": (c_int, (c_void_p, c_uint32, POINTER(LinkOffer), POINTER(LinkSecret))),
    "eep_proxy_is_up": (c_int, (c_void_p, c_uint32, POINTER(c_uint32))),
    "eep_proxy_dismiss": (c_int, (c_void_p, c_uint32)),
    "eep_proxy_ended": (c_int, (c_void_p, c_uint32, POINTER(c_int))),
    "eep_proxy_take_leave": (c_uint32, (c_void_p, c_uint64)),
    "eep_proxy_watch": (None, (c_void_p,)),
    "eep_span_hosts": (c_int, (c_void_p, c_void_p, POINTER(RankSet))),
    "eep_show_mirror": (c_int, (c_void_p, c_void_p, c_uint32)),
    "eep_hide_mirror": (c_int, (c_void_p, c_void_p)),
    "eep_fault_count": (c_uint32, ()),
    "eep_fault_name": (c_char_p, (c_uint32,)),
    "eep_fault_arm": (c_int, (c_uint32, c_uint32, c_uint32, c_uint32)),
    "eep_fault_notify": (None, (c_void_p,)),
    "eep_abi_fields": (POINTER(AbiField), (POINTER(c_uint32),)),
}
