"""The structures of ``eep_cuda/include/eep/hosts.h``, field by field. ``tests/abi`` compares them with the header."""

from __future__ import annotations

import ctypes
from ctypes import c_uint8, c_uint32, c_uint64

MAX_AREAS = 16
TOKEN_BYTES = 16
ADDRESS_BYTES = 64
SIGNAL_WORDS = 6


class Area(ctypes.Structure):
    """Memory that a peer may write."""

    _fields_ = (("address", c_uint64), ("bytes", c_uint64))


class LinkSecret(ctypes.Structure):
    """What a peer must know to write to the areas of one end of a link."""

    _fields_ = (("token", c_uint8 * TOKEN_BYTES), ("keys", c_uint64 * MAX_AREAS))


class LinkOffer(ctypes.Structure):
    """How a peer reaches one end of a link."""

    _fields_ = (
        ("version", c_uint32),
        ("areas", c_uint32),
        ("provider_keys", c_uint32),
        ("address_bytes", c_uint32),
        ("address", c_uint8 * ADDRESS_BYTES),
        ("base", c_uint64 * MAX_AREAS),
        ("bytes", c_uint64 * MAX_AREAS),
        ("keys", c_uint64 * MAX_AREAS),
    )


class Signal(ctypes.Structure):
    """What ends a message."""

    _fields_ = (("words", c_uint64 * SIGNAL_WORDS),)


class RemotePeer(ctypes.Structure):
    """One life of a rank on another host."""

    _fields_ = (
        ("mirror", c_uint64),
        ("rank", c_uint32),
        ("incarnation", c_uint32),
        ("own_incarnation", c_uint32),
        ("reserved", c_uint32),
    )
