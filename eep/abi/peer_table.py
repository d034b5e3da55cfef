"""The structures of ``eep_cuda/include/eep/peer_table.h``, field by field.

The host patches a :class:`PeerTable` between steps; kernels read it through its fixed address. ``tests/abi/test_abi.py``
compares every offset and size below with what the library was compiled with.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64

MAX_RANKS = 512
MAX_CUDA_RANKS = 64
RANK_WORDS = 8
MAX_CHANNELS = 2
MAX_LANES = 64
INCARNATIONS = 2

TRANSPORT_NONE, TRANSPORT_LOCAL, TRANSPORT_MAPPED, TRANSPORT_REMOTE = range(4)

EPOCH_LIMIT = 1 << 24
"""Epochs are below this: a flag has 24 bits for them."""

ALONE_EPOCH = EPOCH_LIMIT - 1
"""What a rank is in before it joins: an epoch of its own, which no instance reaches and no instance revokes."""


class RankSet(ctypes.Structure):
    """A set of ranks as the library has it. Python has an ``int``, bit r for rank r: :attr:`mask`."""

    _fields_ = (("words", c_uint64 * RANK_WORDS),)

    @classmethod
    def of(cls, mask: int) -> RankSet:
        """``OverflowError`` if it names a rank that there cannot be."""
        return cls.from_buffer_copy(mask.to_bytes(ctypes.sizeof(cls), "little"))

    @property
    def mask(self) -> int:
        return int.from_bytes(bytes(self), "little")


class Peer(ctypes.Structure):
    """One entry: how to reach a rank, and which life of it."""

    _fields_ = (
        ("region", c_uint64),
        ("control", c_uint64),
        ("active", c_uint32),
        ("transport", c_uint32),
        ("incarnation", c_uint32),
        ("slot", c_uint32),
        ("epoch", c_uint64),
        ("reserved", c_uint64 * 3),
    )


class PeerTable(ctypes.Structure):
    """What the kernels of one rank know about the others."""

    _fields_ = (
        ("epoch", c_uint64),
        ("deadline_ns", c_uint64),
        ("rank", c_uint32),
        ("max_ranks", c_uint32),
        ("reserved", c_uint64 * 5),
        ("peers", Peer * MAX_RANKS),
    )


class Snapshot(ctypes.Structure):
    """The table as one round sees it; written by the kernels, read here only to look."""

    _fields_ = (
        ("epoch", c_uint64),
        ("round", c_uint64),
        ("deadline_ns", c_uint64),
        ("active", RankSet),
        ("received", RankSet),
        ("phase", c_uint32),
        ("tokens", c_uint32),
        ("slot", c_uint32 * MAX_RANKS),
        ("count", c_uint32 * MAX_RANKS),
        ("region", c_uint64 * MAX_RANKS),
        ("control", c_uint64 * MAX_RANKS),
    )


class ControlPage(ctypes.Structure):
    """The page through which the supervisor and the peers reach a rank's kernels while they run."""

    _fields_ = (
        ("revoked_epoch", c_uint64),
        ("suspects", RankSet),
        ("reserved0", c_uint64 * 7),
        ("dropped", RankSet),
        ("corrupt", RankSet),
        ("status", c_uint64),
        ("reserved1", c_uint64 * 7),
        ("doorbell", c_uint32),
        ("sleepers", c_uint32),
        ("wake_at", c_uint32),
        ("reserved2", c_uint32 * 13),
        ("state", c_uint64),
        ("host", c_uint64),
        ("reserved3", c_uint64 * 6),
        ("groups", c_uint64 * MAX_LANES),
    )


def slot_of(rank: int, incarnation: int, max_ranks: int) -> int:
    """The inbox slot that an incarnation of ``rank`` writes to: never that of the one before it."""
    return rank + max_ranks * (incarnation % INCARNATIONS)


def ranks_of(mask: int) -> tuple[int, ...]:
    """The ranks whose bits are set, ascending."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
