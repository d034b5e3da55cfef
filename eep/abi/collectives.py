"""The structures of the collectives in ``eep_cuda/include/eep/eep.h``, field by field, and the numbers of its enumerations.

Pure ctypes, like :mod:`eep.abi.native`, which declares the functions.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_uint32, c_uint64, c_void_p
from enum import IntEnum

from eep.abi.peer_table import MAX_RANKS, RankSet


class Kind(IntEnum):
    BARRIER = 0
    BROADCAST = 1
    ALL_REDUCE = 2
    REDUCE = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8


class Element(IntEnum):
    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    U64 = 6
    I64 = 7
    F16 = 8
    BF16 = 9
    F32 = 10
    F64 = 11
    BOOL = 12
    BYTES = 13


class Reduction(IntEnum):
    SUM = 0
    AVG = 1
    MIN = 2
    MAX = 3
    PROD = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class OwnerState(IntEnum):
    """What the owner of a control page says of itself."""

    ALONE = 0
    WAITING = 1
    LEFT = 2


class Group(ctypes.Structure):
    _fields_ = (
        ("id", c_uint64),
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("ranks", c_uint32 * MAX_RANKS),
    )


class CollectiveArgs(ctypes.Structure):
    _fields_ = (
        ("in_", c_void_p),
        ("out", c_void_p),
        ("bytes", c_uint64),
        ("in_blocks", POINTER(c_void_p)),
        ("in_bytes", POINTER(c_uint64)),
        ("out_blocks", POINTER(c_void_p)),
        ("out_bytes", POINTER(c_uint64)),
        ("deadline_ns", c_uint64),
        ("answered", RankSet),
        ("lane", c_uint32),
        ("kind", c_uint32),
        ("element", c_uint32),
        ("reduction", c_uint32),
        ("root", c_uint32),
        ("reserved", c_uint32),
    )


class MessageHeader(ctypes.Structure):
    """What a probe shows of the next message of a source (``eep_message``)."""

    _fields_ = (
        ("tag", c_uint64),
        ("bytes", c_uint64),
        ("source", c_uint32),
        ("arrived", c_uint32),
    )


class LaneMailbox(ctypes.Structure):
    """What one member of a group signals to another; one cache line. Bit 0 of the flag is the half that the pairs go by."""

    _fields_ = (
        ("flag", c_uint64),
        ("group", c_uint64),
        ("call", c_uint64 * 2),
        ("bytes", c_uint64 * 2),
        ("members", c_uint64 * 2),
    )
