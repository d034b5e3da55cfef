"""Host memory in place of a GPU's driver, for what :mod:`eep.data_plane.memory.parted` makes of it.

Handles are descriptors of memfds. What the real driver does with the same calls, ``tests/gpu/test_parts.py`` shows.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import pytest
import torch

from eep.data_plane.memory import driver
from eep.errors import EepError

UNIT = mmap.PAGESIZE
_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class HostDriver:
    def __init__(self, units: int) -> None:
        """With memory for so many units."""
        self.left = units
        self.mapped: dict[int, int] = {}
        """Descriptors of what is mapped, by address."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        outer = self

        class Mapping:
            def __init__(self, size: int, device: int) -> None:
                self.size = size
                self._map = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
                self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

            def put(self, offset: int, pieces: Sequence[tuple[int, int]], *, keeps: bool = False) -> None:
                at = self.address + offset
                for handle, size in pieces:
                    access = mmap.PROT_READ | mmap.PROT_WRITE
                    assert _libc.mmap(at, size, access, mmap.MAP_SHARED | _FIXED, handle, 0) == at
                    outer.mapped[at] = os.dup(handle)
                    at += size
                for handle in set() if keeps else {handle for handle, _ in pieces}:
                    os.close(handle)

            def shown(self, offset: int, size: int) -> torch.Tensor:
                return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=size)

        class Filler:
            def __init__(self, device: int) -> None:
                self._handle = _memfd(UNIT)
                weakref.finalize(self, os.close, self._handle)

            def fill(self, mapping: Mapping, offset: int, size: int) -> None:
                mapping.put(offset, [(self._handle, UNIT)] * (size // UNIT), keeps=True)

        for name, value in (
            ("Mapping", Mapping),
            ("Filler", Filler),
            ("granularity_of", lambda device: UNIT),
            ("current_device", lambda: 0),
            ("create_shared", self._create_shared),
            ("import_shared", os.dup),
            ("handle_at", lambda address: os.dup(self.mapped[address])),
        ):
            patch.setattr(driver, name, value)

    def _create_shared(self, device: int, size: int) -> tuple[int, int]:
        if size // UNIT > self.left:
            raise EepError("cuMemCreate failed: out of memory")
        self.left -= size // UNIT
        descriptor = _memfd(size)
        return os.dup(descriptor), descriptor


def _memfd(size: int) -> int:
    descriptor = os.memfd_create("driver", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor
