"""The PEs of NVSHMEM: every process of the fleet is one, from the first case to the last. No other can come, none may go.

NVSHMEM calls several PEs on one GPU MPG. Under MPS it supports all of its calls there. It asks the MPS daemon itself whether
MPS runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from bench.exchange.nvshmem.put_library import load_puts

STATUSES = {2: "a GPU for each PE", 3: "PEs that share a GPU without MPS", 4: "PEs that share a GPU under MPS"}
"""What ``nvshmemx_init_status`` says of PEs that have started."""
_SPARE_BYTES = 64 << 20
"""Of the symmetric heap, for what NVSHMEM itself keeps there."""


def variables(heap_bytes: int) -> dict[str, str]:
    """The environment of the PEs: one host, no network, one GPU."""
    return {
        # The PEs find each other over a TCP socket of this host.
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY": "AF_INET",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        # Its proxy serves remote transports, and would take a core for each PE.
        "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
        # The whole heap at the start, mapped by the peers as CUDA IPC memory.
        "NVSHMEM_DISABLE_CUDA_VMM": "1",
        "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes + _SPARE_BYTES),
        "NVSHMEM_DISABLE_NCCL": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        # That blocks which wait leave room for those that they wait for is seen to in puts.cu.
        "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1",
        # A kernel that is loaded at its first launch waits for those that wait for it.
        "CUDA_MODULE_LOADING": "EAGER",
    }


@dataclass
class SymmetricMemory:
    """The symmetric heap of this process's PE, given out as a stack: in the same order by all PEs, so that what one of them
    takes has the same place everywhere."""

    address: int
    size: int
    used: int = 0

    def take(self, size: int) -> int:
        """The address of so many bytes. MemoryError if there are not so many."""
        if self.used + size > self.size:
            raise MemoryError(f"{size} bytes of the symmetric heap are asked for, and {self.size - self.used} are left")
        self.used += size
        return self.address + self.used - size

    def give_back(self, size: int) -> None:
        """The last that was taken."""
        self.used -= size


_memory: list[SymmetricMemory] = []
"""That of this process, from start to stop."""


def symmetric_memory() -> SymmetricMemory:
    """RuntimeError if this process is no PE."""
    if not _memory:
        raise RuntimeError("this process has not been started as a PE of NVSHMEM")
    return _memory[0]


def make_world_id(library: str) -> bytes:
    """By which the PEs find each other. The process that makes it is one of them."""
    loaded = load_puts(library)
    made = ctypes.create_string_buffer(int(loaded.id_bytes()))
    if code := loaded.make_id(made):
        raise AssertionError(f"NVSHMEM made no id for its PEs: error {code}")
    return made.raw


def start_as_pe(owned: list[int], ranks: int, library: str, made: bytes, heap_bytes: int) -> str:
    """By all processes at once."""
    torch.zeros(1, device="cuda")  # makes the context of the process
    loaded = load_puts(library)
    status = loaded.start_pe(made, owned[0], ranks)
    if status not in STATUSES:
        raise AssertionError(f"NVSHMEM did not start: nvshmemx_init_status is {status}")
    address = loaded.take_memory(heap_bytes)
    if not address:
        raise AssertionError(f"NVSHMEM gave no {heap_bytes} bytes of its heap that all PEs can reach by load and store")
    _memory.append(SymmetricMemory(address, heap_bytes))
    return STATUSES[status]


def stop_as_pe(owned: list[int], library: str) -> None:
    """By all processes at once."""
    torch.cuda.synchronize()
    load_puts(library).stop_pe(_memory.pop().address)
