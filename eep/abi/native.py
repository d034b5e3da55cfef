"""The C ABI of ``eep_cuda/include/eep/eep.h``: argument structures, prototypes, and loading of the library.

Pure ctypes; no torch. A negative return code becomes a Python exception with the library's own sentence.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p

from eep.abi.collectives import CollectiveArgs, Group, Message
from eep.abi.peer_table import ControlPage, PeerTable, Snapshot
from eep.errors import EepError, EpochRevoked

ABI_VERSION = 4
MAX_TOPK = 16
MAX_TOKENS = 65535
SCALE_GROUP = 128
BENCH_FIXED_MEMBERSHIP, BENCH_STAMPS = 1, 2

LAYOUTS = {"rank": 0, "expert": 1}
TYPES = {"f32": 0, "bf16": 1, "fp8": 2, "fp8_pow2": 3, "fp8_ue8m0": 4}

_ERRORS: dict[int, type[Exception]] = {-1: ValueError, -2: EepError, -3: EpochRevoked, -5: ValueError}


class Shape(ctypes.Structure):
    """What all ranks of an instance must agree on: sizes and types."""

    NAMES = (
        "max_ranks",
        "max_tokens",
        "hidden",
        "max_topk",
        "local_experts",
        "layout",
        "wire_type",
        "combine_type",
        "channels",
        "lanes",
        "lane_parts",
        "lane_bytes",
        "pipe_bytes",
        "reserved",
    )
    _fields_ = tuple((name, c_uint32) for name in NAMES)


class RegionLayout(ctypes.Structure):
    """Where everything lies in a region."""

    _fields_ = (
        ("total_bytes", c_uint64),
        ("channel_bytes", c_uint64),
        ("mailboxes", c_uint64),
        ("outbox_stamp", c_uint64),
        ("topk_idx", c_uint64),
        ("topk_weights", c_uint64),
        ("rows", c_uint64),
        ("scales", c_uint64),
        ("outbox", c_uint64),
        ("row_bytes", c_uint64),
        ("scale_bytes", c_uint64),
        ("outbox_row_bytes", c_uint64),
        ("lanes", c_uint64),
        ("lane_bytes", c_uint64),
        ("part_bytes", c_uint64),
        ("lane_mailboxes", c_uint64),
        ("lane_stamps", c_uint64),
        ("lane_outbox", c_uint64),
        ("pipes", c_uint64),
        ("pipe_stride", c_uint64),
        ("slots", c_uint32),
        ("reserved", c_uint32),
    )


class Mailbox(ctypes.Structure):
    """The flags of one source; one cache line."""

    _fields_ = (
        ("dispatch_flag", c_uint64),
        ("envelope", c_uint64),
        ("combine_flag", c_uint64),
        ("barrier_flag", c_uint64),
        ("barrier_before", c_uint64),
        ("reserved", c_uint64 * 3),
    )


class DispatchSendArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("tokens", c_uint32),
        ("topk", c_uint32),
        ("x_type", c_uint32),
        ("wire_type", c_uint32),
        ("channel", c_uint32),
        ("reserved", c_uint32),
    )


class DispatchRecvArgs(ctypes.Structure):
    _fields_ = (
        ("count", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("packed_rows", c_void_p),
        ("packed_scales", c_void_p),
        ("packed_count", c_void_p),
        ("src_info", c_void_p),
        ("layout_range", c_void_p),
        ("topk", c_uint32),
        ("wire_type", c_uint32),
        ("channel", c_uint32),
        ("reserved", c_uint32),
    )


class CombineSendArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("src_info", c_void_p),
        ("layout_range", c_void_p),
        ("topk", c_uint32),
        ("channel", c_uint32),
    )


class CombineRecvArgs(ctypes.Structure):
    _fields_ = (
        ("out", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("tokens", c_uint32),
        ("topk", c_uint32),
        ("channel", c_uint32),
        ("reserved", c_uint32),
    )


class BlockStamps(ctypes.Structure):
    """When a block of a dispatch passed its stations; for benchmarks."""

    STATIONS = ("start", "members read", "rows issued", "rows counted", "flags sent", "flags seen", "end")
    _fields_ = (("began_ns", c_uint64), ("ended_ns", c_uint64), ("clock", c_int64 * len(STATIONS)))


class AbiField(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("offset", c_uint64), ("size", c_uint64))


_PROTOTYPES = {
    "eep_abi_version": (c_uint32, ()),
    "eep_last_error": (c_char_p, ()),
    "eep_region_layout_compute": (c_int, (POINTER(Shape), POINTER(RegionLayout))),
    "eep_create": (c_int, (POINTER(Shape), c_uint32, c_void_p, c_void_p, POINTER(c_void_p))),
    "eep_destroy": (None, (c_void_p,)),
    "eep_tune": (c_int, (c_void_p, c_uint32, c_uint32)),
    "eep_share_gpu": (c_int, (c_void_p,)),
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
    "eep_probe": (c_int, (c_void_p, c_uint32, c_uint64, c_uint32, c_uint64, POINTER(Message))),
    "eep_pokes": (c_uint32, (c_void_p,)),
    "eep_poke": (None, (c_void_p,)),
    "eep_recv": (c_int, (c_void_p, c_uint32, c_uint32, c_void_p, c_uint64, c_uint64, POINTER(c_uint32))),
    "eep_copy_batch": (
        c_int,
        (c_uint32, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_uint64), c_void_p),
    ),
    "eep_control_state": (None, (POINTER(ControlPage), c_uint64)),
    "eep_control_revoke": (None, (POINTER(ControlPage), c_uint64)),
    "eep_control_suspect": (None, (POINTER(ControlPage), c_uint64)),
    "eep_revoke": (None, (c_void_p, c_uint64)),
    "eep_fault_count": (c_uint32, ()),
    "eep_fault_name": (c_char_p, (c_uint32,)),
    "eep_fault_arm": (c_int, (c_uint32, c_uint32, c_uint32, c_uint32)),
    "eep_fault_notify": (None, (c_void_p,)),
    "eep_abi_fields": (POINTER(AbiField), (POINTER(c_uint32),)),
}


def _find(name: str) -> pathlib.Path:
    # An editable install has the package in two places: the sources, and what pip has built, which may be older than
    # what "make build" has put beside the sources.
    packages = dict.fromkeys([pathlib.Path(__file__).parent.parent, *map(pathlib.Path, sys.modules["eep"].__path__)])
    places = [package / "lib" for package in packages]
    if override := os.environ.get("EEP_LIBRARY_DIR"):
        places.insert(0, pathlib.Path(override))
    for place in places:
        if (path := place / name).exists():
            return path
    raise EepError(
        f"{name} was not found in {', '.join(map(str, places))}; install the package with pip, or run 'make build' in "
        "the source tree"
    )


@functools.cache
def load(backend: str = "cpu") -> ctypes.CDLL:
    """The library of a backend, with every function declared."""
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"there is no data plane for device {backend!r}: use 'cpu' or 'cuda'")
    path = _find(f"libeep_{backend}.so")
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if (found := library.eep_abi_version()) != ABI_VERSION:
        raise EepError(f"{path} speaks ABI {found}, this package speaks {ABI_VERSION}: build it again")
    return library


def check(library: ctypes.CDLL, code: int) -> None:
    """Raises what a negative return code stands for."""
    if code:
        raise _ERRORS.get(code, EepError)(library.eep_last_error().decode())
