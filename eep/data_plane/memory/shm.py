"""Memory shared between processes by descriptor: a sealed memfd and a mapping of it.

It has no name anywhere, so nothing is left behind when its users are killed: the kernel frees it with the last
descriptor and mapping. Its size is sealed, so that no peer can shrink it under us and turn our next access into a SIGBUS.
A survivor's mapping outlives the process that made the memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from eep.errors import PeerUnreachable

if TYPE_CHECKING:
    import torch

_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """``size`` bytes at ``address``, the same bytes in every process that holds ``fd``."""

    def __init__(self, fd: int, size: int) -> None:
        """Takes over ``fd``. Use :meth:`create` or :meth:`adopt`."""
        self.fd = fd
        self.size = size
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, label: str, size: int) -> SharedMemory:
        """New memory, zeroed. ``label`` only shows up in /proc/<pid>/maps."""
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, size: int) -> SharedMemory:
        """Memory whose descriptor a peer sent us, mapped only if it is what it should be. Takes over ``fd``."""
        try:
            found = os.fstat(fd).st_size
            if found != size:
                raise PeerUnreachable(f"a peer sent memory of {found} bytes where {size} were due")
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise PeerUnreachable("a peer sent a descriptor that is not sealed memory") from error
            if seals & _SEALS != _SEALS:
                raise PeerUnreachable("a peer sent memory that it could still shrink: its size is not sealed")
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def placeholder(cls, size: int) -> SharedMemory:
        """Memory of this process alone, of which the kernel gives only what is written to. See :class:`Memory`."""
        memory = cls.__new__(cls)
        memory.fd, memory.size = -1, size
        memory.map = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory.map))
        return memory

    def become(self, other: SharedMemory) -> None:
        """Puts the memory of ``other`` behind these addresses, and takes over its descriptor."""
        if self.fd >= 0 or other.size != self.size:
            raise ValueError(f"memory of {other.size} bytes cannot take the place of a placeholder of {self.size}")
        mapped = _libc.mmap(
            self.address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, other.fd, 0
        )
        if mapped != self.address:
            raise OSError(ctypes.get_errno(), "cannot map memory in place of a placeholder")
        self.fd = os.dup(other.fd)
        os.set_inheritable(self.fd, False)
        other.close()

    def back(self, offset: int, size: int) -> None:
        """The kernel gives memory to what is written to."""

    def give_up(self, offset: int, size: int) -> None:
        """Makes a hole, which reads as zeros."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if self.fd < 0 or first >= end:
            return
        if _libc.fallocate(self.fd, _KEEP_SIZE | _PUNCH_HOLE, first, end - first):
            code = ctypes.get_errno()
            raise OSError(code, f"memory cannot be given up: {os.strerror(code)}")

    def gain_of(self, offset: int, size: int) -> int:
        """All of it, but for parts of pages at its ends."""
        return size

    def cost_of(self, offset: int, size: int) -> int:
        return size

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of the memory, with a storage of its own; it keeps the mapping alive."""
        import torch

        return torch.frombuffer(self.map, dtype=torch.uint8, offset=offset, count=size)

    def close(self) -> None:
        """Lets go of the descriptor now, and of the mapping as soon as no tensor looks into it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if hasattr(self, "map"):
            # Not unmapped by force: tensors hold a reference to the mapping, but do not lock it.
            del self.map
