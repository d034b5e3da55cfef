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
from ctypes import c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import TYPE_CHECKING, Any

from eep.errors import EepError, PeerUnreachable

if TYPE_CHECKING:
    import torch

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_POSIX_FD, _FABRIC = 1, 8  # kinds of handles
_HAS_FABRIC_HANDLES = 128  # an attribute of a device
_FABRIC_HANDLE_BYTES = 64


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
    """An allocation mapped at an address of its own; unmapped when the last tensor that shows it is gone."""

    def __init__(self, handle: int, size: int, device: int) -> None:
        self.size = size
        address = c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(address), c_size_t(size), c_size_t(0), c_ulonglong(0), c_ulonglong(0))
        try:
            _call("cuMemMap", address, c_size_t(size), c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
            access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
            _call("cuMemSetAccess", address, c_size_t(size), ctypes.byref(access), c_size_t(1))
        except EepError:
            _driver().cuMemAddressFree(address, c_size_t(size))
            raise
        finally:
            _driver().cuMemRelease(c_ulonglong(handle))  # the mapping keeps the memory
        self.address = address.value
        weakref.finalize(self, _unmap, self.address, size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _unmap(address: int, size: int) -> None:
    _driver().cuMemUnmap(c_ulonglong(address), c_size_t(size))
    _driver().cuMemAddressFree(c_ulonglong(address), c_size_t(size))


class DeviceMemory:
    """At least ``size`` bytes at ``address`` on the current GPU, the same bytes in every process that holds ``fd``."""

    def __init__(self, fd: int, size: int, handle: int, device: int) -> None:
        """Takes over ``fd``. Use :meth:`create` or :meth:`adopt`."""
        self.fd = fd
        self.size = size
        self._mapping: _Mapping | None = _Mapping(handle, _rounded(size, device), device)
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
        memory = cls(fd.value, size, handle, device)
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
            return cls(fd, size, handle.value, device)
        except EepError as error:
            os.close(fd)
            raise PeerUnreachable(f"a peer sent memory that this GPU cannot map: {error}") from error

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
