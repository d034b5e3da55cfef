"""The structures of dispatch and combine in ``eep_cuda/include/eep``, field by field, and the numbers of their enumerations.

Pure ctypes, like :mod:`eep.abi.functions`, which has the functions. ``tests/abi`` compares all of it with the headers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum

MAX_TOPK = 16
MAX_TOKENS = 65535
SCALE_GROUP = 128
BENCH_FIXED_MEMBERSHIP, BENCH_STAMPS, BENCH_UNCHECKED, BENCH_UNCLOSED = 1, 2, 4, 8
BENCH_WIDE, BENCH_AT_ONCE, BENCH_UNFENCED = 16, 32, 64
STAMPED_BLOCKS = 32
"""Of each of the two kernels."""

LAYOUTS = {"rank": 0, "expert": 1}
TYPES = {"f32": 0, "bf16": 1, "fp8": 2, "fp8_pow2": 3, "fp8_ue8m0": 4}


class ErrorCode(IntEnum):
    """What a function that can fail returns. After any but OK nothing has changed."""

    OK = 0
    ERROR_ARGUMENT = -1
    ERROR_PHASE = -2
    ERROR_VIEW = -3
    ERROR_DEVICE = -4
    ERROR_MISMATCH = -5


class StatusBit(IntEnum):
    """Why a step is not to be trusted: the bits of the status word in a control page."""

    REVOKED = 1
    SUSPECT = 2
    CORRUPT = 4
    MISROUTED = 8
    TORN = 16
    BAD_TABLE = 32
    MISMATCH = 64


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
        ("output_row_bytes", c_uint64),
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


class Piece(ctypes.Structure):
    """What a source says of a piece of a round beside the first."""

    _fields_ = (("dispatch_flag", c_uint64), ("envelope", c_uint64))


class Mailbox(ctypes.Structure):
    """The flags of one source."""

    _fields_ = (
        ("dispatch_flag", c_uint64),
        ("envelope", c_uint64),
        ("combine_flag", c_uint64),
        ("barrier_flag", c_uint64),
        ("barrier_before", c_uint64),
        ("reserved", c_uint64 * 3),
        ("further", Piece * 3),
        ("reserved_too", c_uint64 * 2),
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
    """When a block of a dispatch or a combine passed its stations; for benchmarks."""

    STATIONS = ("start", "members read", "rows issued", "rows counted", "flags sent", "flags seen", "end")
    COMBINE_STATIONS = ("start", "members read", "answered", "parts found", "outboxes seen", "summed", "end")
    _fields_ = (("began_ns", c_uint64), ("ended_ns", c_uint64), ("clock", c_int64 * len(STATIONS)))


class PageCopyArgs(ctypes.Structure):
    _fields_ = (
        ("from_", POINTER(c_void_p)),
        ("row_bytes", POINTER(c_uint64)),
        ("table", c_void_p),
        ("pages", c_void_p),
        ("page_bytes", c_uint64),
        ("places", c_void_p),
        ("same", c_void_p),
        ("rows", c_void_p),
        ("brought", c_void_p),
        ("gathered", c_void_p),
        ("layers", c_uint32),
        ("page_tokens", c_uint32),
        ("most", c_uint32),
        ("reserved", c_uint32),
    )


class AbiField(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("offset", c_uint64), ("size", c_uint64))
