"""The driver's virtual memory management: allocations, descriptors of them, and addresses at which they are mapped.

Calls the driver library directly; needs no CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import TYPE_CHECKING, Any

from eep.errors import EepError

if TYPE_CHECKING:
    import torch

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_POSIX_FD, _FABRIC = 1, 8  # kinds of handles
_HAS_FABRIC_HANDLES = 128  # an attribute of a device
_FABRIC_HANDLE_BYTES = 64
_FILLER_BYTES = 32 << 20


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


def granularity_of(device: int, handle_types: int = _POSIX_FD) -> int:
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
            if size % granularity_of(device, both) == 0:
                return _create_with(device, size, both)
    return _create_with(device, size, _POSIX_FD)


def _create_with(device: int, size: int, handle_types: int) -> int:
    handle, properties = c_ulonglong(), _properties(device, handle_types)
    _call("cuMemCreate", ctypes.byref(handle), c_size_t(size), ctypes.byref(properties), c_ulonglong(0))
    return handle.value


def create_shared(device: int, size: int) -> tuple[int, int]:
    """A new allocation: its handle, and a descriptor of it."""
    handle, fd = _create(device, size), c_int()
    try:
        _call("cuMemExportToShareableHandle", ctypes.byref(fd), c_ulonglong(handle), _POSIX_FD, c_ulonglong(0))
    except EepError:
        _driver().cuMemRelease(c_ulonglong(handle))
        raise
    return handle, fd.value


def import_shared(fd: int) -> int:
    """A handle of the allocation behind a descriptor."""
    handle = c_ulonglong()
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), c_void_p(fd), _POSIX_FD)
    return handle.value


def handle_at(address: int) -> int:
    """A handle of the allocation that is mapped at an address."""
    handle = c_ulonglong()
    _call("cuMemRetainAllocationHandle", ctypes.byref(handle), c_void_p(address))
    return handle.value


def fabric_handle(handle: int) -> bytes | None:
    """By which another host of the same NVLink domain could map this allocation, where the driver gives one."""
    exported = ctypes.create_string_buffer(_FABRIC_HANDLE_BYTES)
    try:
        _call("cuMemExportToShareableHandle", exported, c_ulonglong(handle), _FABRIC, c_ulonglong(0))
    except EepError:
        return None
    return exported.raw


def release(handle: int) -> None:
    _driver().cuMemRelease(c_ulonglong(handle))


class Filler:
    """A small allocation or two that lie behind as many addresses as it takes, wherever there is no other memory."""

    def __init__(self, device: int) -> None:
        self._device, self._unit = device, granularity_of(device)
        self._handles: dict[int, int] = {}
        """By size."""
        weakref.finalize(self, _release_all, self._handles)

    def fill(self, mapping: Mapping, offset: int, size: int) -> None:
        """Lies behind these addresses from now on; ``size`` in whole units. The mapping keeps the memory, not this."""
        mapping.put(offset, self._pieces(size), keeps=True)

    def _pieces(self, size: int) -> list[tuple[int, int]]:
        """For :meth:`Mapping.put`. Good for as long as this lives: then the handles are released."""
        found: list[tuple[int, int]] = []
        for piece in (max(self._unit, _FILLER_BYTES // self._unit * self._unit), self._unit):
            if size >= piece:
                if piece not in self._handles:
                    self._handles[piece] = _create(self._device, piece)
                found += [(self._handles[piece], piece)] * (size // piece)
                size %= piece
        return found


def _release_all(handles: dict[int, int]) -> None:
    for handle in handles.values():
        release(handle)


def current_device() -> int:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    device: int = torch.cuda.current_device()
    torch.cuda.synchronize(device)  # makes the device's context current in this thread
    return device


class Mapping:
    """Addresses for allocations; free again when the last tensor that shows them is gone."""

    def __init__(self, size: int, device: int) -> None:
        self.size, self._device = size, device
        address = c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(address), c_size_t(size), *[c_size_t(0)] * 2, c_ulonglong(0))
        self.address = address.value
        self._pieces: list[tuple[int, int]] = []
        """Addresses and sizes of what is mapped."""
        weakref.finalize(self, _unmap, self.address, size, self._pieces)

    def put(self, offset: int, pieces: Sequence[tuple[int, int]], *, keeps: bool = False) -> None:
        """Map ``pieces`` (handles and sizes) one after the other, from ``offset`` on, in place of what is mapped there. Takes
        over the handles, unless the caller ``keeps`` them."""
        size = sum(size for _, size in pieces)
        self._clear(offset, size)
        at = self.address + offset
        try:
            for handle, length in pieces:
                _call("cuMemMap", c_ulonglong(at), c_size_t(length), c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
                self._pieces.append((at, length))
                at += length
            access = _Access(_Location(_ON_DEVICE, self._device), _READ_WRITE)
            _call(
                "cuMemSetAccess", c_ulonglong(self.address + offset), c_size_t(size), ctypes.byref(access), c_size_t(1)
            )
        finally:
            for handle in set() if keeps else {handle for handle, _ in pieces}:
                release(handle)  # the mapping keeps the memory

    def _clear(self, offset: int, size: int) -> None:
        first, end = self.address + offset, self.address + offset + size
        inside = [piece for piece in self._pieces if first <= piece[0] < end]
        self._pieces[:] = [piece for piece in self._pieces if not first <= piece[0] < end]
        _unmap_pieces(inside)

    def shown(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of it, which keeps the addresses."""
        import torch

        return torch.as_tensor(self, device="cuda")[offset : offset + size]

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


def rounded(size: int, device: int) -> int:
    """To whole units of the driver."""
    granularity = granularity_of(device)
    return (size + granularity - 1) // granularity * granularity
