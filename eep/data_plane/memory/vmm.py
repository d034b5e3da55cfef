"""Memory on a GPU shared between processes by descriptor: the driver's virtual memory management.

The allocation is reference-counted by the driver across processes, so that a survivor's mapping outlives the process
that made it (legacy CUDA IPC promises nothing of the kind). Calls the driver library directly; needs no CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import TYPE_CHECKING, Any

from eep.errors import EepError, PeerUnreachable

if TYPE_CHECKING:
    import torch

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_POSIX_FD, _FABRIC = 1, 8  # kinds of handles
_HAS_FABRIC_HANDLES = 128  # an attribute of a device
_FABRIC_HANDLE_BYTES = 64
_PLACEHOLDER_BYTES = 32 << 20


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EepError("libcuda.so.1 was not found; install the CUDA driver, or use device='cpu'") from error


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise EepError(f"{name} failed: {text.value.decode() if text.value else code}")


def _properties(device: int, handle_types: int = _POSIX_FD) -> _AllocationProperties:
    return _AllocationProperties(_PINNED, handle_types, _Location(_ON_DEVICE, device))


def _granularity(device: int, handle_types: int = _POSIX_FD) -> int:
    size = c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(_properties(device, handle_types)), 0)
    return size.value


def _create(device: int, size: int) -> int:
    """A new allocation, exportable to the fabric too where the device and its driver allow it."""
    has_fabric = c_int()
    if _driver().cuDeviceGetAttribute(ctypes.byref(has_fabric), _HAS_FABRIC_HANDLES, device) == 0 and has_fabric.value:
        # A device may say so on a host that was not set up for it (no IMEX channel): then the driver refuses here.
        with contextlib.suppress(EepError):
            both = _POSIX_FD | _FABRIC
            if size % _granularity(device, both) == 0:
                return _create_with(device, size, both)
    return _create_with(device, size, _POSIX_FD)


def _create_with(device: int, size: int, handle_types: int) -> int:
    handle, properties = c_ulonglong(), _properties(device, handle_types)
    _call("cuMemCreate", ctypes.byref(handle), c_size_t(size), ctypes.byref(properties), c_ulonglong(0))
    return handle.value


def _current_device() -> int:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    device: int = torch.cuda.current_device()
    torch.cuda.synchronize(device)  # makes the device's context current in this thread
    return device


class _Mapping:
    """Allocations mapped one after the other at addresses of their own; unmapped when the last tensor that shows it is
    gone. ``pieces`` are handles and sizes, of which this takes over a reference each."""

    def __init__(self, pieces: Sequence[tuple[int, int]], device: int) -> None:
        self.size, self._device = sum(size for _, size in pieces), device
        address = c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(address), c_size_t(self.size), *[c_size_t(0)] * 2, c_ulonglong(0))
        self.address = address.value
        self._pieces: list[tuple[int, int]] = []
        """Addresses and sizes of what is mapped."""
        weakref.finalize(self, _unmap, self.address, self.size, self._pieces)
        self._map(pieces)

    def replace(self, handle: int, size: int) -> None:
        """Map this in place of what was mapped."""
        _unmap_pieces(self._pieces)
        self._map([(handle, size)])

    def _map(self, pieces: Sequence[tuple[int, int]]) -> None:
        at = self.address
        try:
            for handle, size in pieces:
                _call("cuMemMap", c_ulonglong(at), c_size_t(size), c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
                self._pieces.append((at, size))
                at += size
            access = _Access(_Location(_ON_DEVICE, self._device), _READ_WRITE)
            _call("cuMemSetAccess", c_ulonglong(self.address), c_size_t(self.size), ctypes.byref(access), c_size_t(1))
        finally:
            for handle in {handle for handle, _ in pieces}:
                _driver().cuMemRelease(c_ulonglong(handle))  # the mapping keeps the memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _unmap(address: int, size: int, pieces: list[tuple[int, int]]) -> None:
    _unmap_pieces(pieces)
    _driver().cuMemAddressFree(c_ulonglong(address), c_size_t(size))


def _unmap_pieces(pieces: list[tuple[int, int]]) -> None:
    while pieces:
        address, size = pieces.pop()
        _driver().cuMemUnmap(c_ulonglong(address), c_size_t(size))


class DeviceMemory:
    """At least ``size`` bytes at ``address`` on the current GPU, the same bytes in every process that holds ``fd``."""

    def __init__(self, fd: int, size: int, pieces: Sequence[tuple[int, int]], device: int) -> None:
        """Takes over ``fd`` and the handles. Use :meth:`create`, :meth:`adopt` or :meth:`placeholder`."""
        self.fd = fd
        self.size = size
        self._mapping: _Mapping | None = _Mapping(pieces, device)
        self.address = self._mapping.address

    @classmethod
    def create(cls, label: str, size: int) -> DeviceMemory:
        """New memory, zeroed."""
        device = _current_device()
        handle, fd = _create(device, _rounded(size, device)), c_int()
        try:
            _call("cuMemExportToShareableHandle", ctypes.byref(fd), c_ulonglong(handle), _POSIX_FD, c_ulonglong(0))
        except EepError:
            _driver().cuMemRelease(c_ulonglong(handle))
            raise
        memory = cls(fd.value, size, [(handle, _rounded(size, device))], device)
        memory.bytes_at(0, size).zero_()
        _current_device()  # zeroed before any peer is told of it
        return memory

    @classmethod
    def adopt(cls, fd: int, size: int) -> DeviceMemory:
        """Memory whose descriptor a peer sent us. Takes over ``fd``."""
        try:
            device = _current_device()
            handle = c_ulonglong()
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), c_void_p(fd), _POSIX_FD)
            return cls(fd, size, [(handle.value, _rounded(size, device))], device)
        except EepError as error:
            os.close(fd)
            raise PeerUnreachable(f"a peer sent memory that this GPU cannot map: {error}") from error

    @classmethod
    def placeholder(cls, size: int) -> DeviceMemory:
        """The same small piece of memory again and again, over as many addresses as it takes."""
        device = _current_device()
        whole = _rounded(size, device)
        piece = min(whole, _PLACEHOLDER_BYTES)
        handle = _create(device, piece)
        pieces = [(handle, piece)] * (whole // piece)
        if whole % piece:
            pieces.append((_create(device, whole % piece), whole % piece))
        return cls(-1, size, pieces, device)

    def become(self, other: DeviceMemory) -> None:
        """Puts the memory of ``other`` behind these addresses, and takes over its descriptor."""
        if self._mapping is None or self.fd >= 0 or other.size != self.size:
            raise ValueError(f"memory of {other.size} bytes cannot take the place of a placeholder of {self.size}")
        _current_device()  # nothing runs on it any more
        handle = c_ulonglong()
        _call("cuMemRetainAllocationHandle", ctypes.byref(handle), c_void_p(other.address))
        self._mapping.replace(handle.value, self._mapping.size)
        self.fd = os.dup(other.fd)
        other.close()

    def back(self, offset: int, size: int) -> None:
        """All of it has memory, always: it is one allocation, of which the driver takes no part back."""

    def give_up(self, offset: int, size: int) -> None:
        raise EepError("memory on a GPU is one allocation, and the driver takes no part of it back")

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of the memory; it keeps the mapping alive."""
        import torch

        whole = torch.as_tensor(self._mapping, device="cuda")
        return whole[offset : offset + size]

    def fabric_handle(self) -> bytes | None:
        """A handle by which another host of the same NVLink domain could map this memory, where the driver gives one.

        Not in use yet: ranks exchange descriptors, on one host. No such import has been run.
        """
        handle, exported = c_ulonglong(), ctypes.create_string_buffer(_FABRIC_HANDLE_BYTES)
        _call("cuMemRetainAllocationHandle", ctypes.byref(handle), c_void_p(self.address))
        try:
            _call("cuMemExportToShareableHandle", exported, handle, _FABRIC, c_ulonglong(0))
        except EepError:
            return None
        finally:
            _driver().cuMemRelease(handle)
        return exported.raw

    def close(self) -> None:
        """Lets go of the descriptor now, and of the mapping as soon as no tensor looks into it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._mapping = None


def _rounded(size: int, device: int) -> int:
    granularity = _granularity(device)
    return (size + granularity - 1) // granularity * granularity
