"""The memory of a lost rank, mapped into this process. It stays mapped for the next request of the same life."""

from __future__ import annotations

import threading

import torch

from eep.data_plane.memory import Memory
from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.kv_journal import JournalReader
from sglang_patches.rank.kv.anchored_pool import CACHE, JOURNAL, TABLE, AnchoredPool, as_layers, layers_bytes


class NoRestore(Exception):
    """Why a context is computed instead."""


class LostPool:
    """Journal, table and cache of ``rank``. NoRestore if they are not held, or not like those of this rank."""

    def __init__(self, mine: AnchoredPool, rank: int) -> None:
        assert mine.table is not None
        noted, self.life = _mapped(mine, rank, JOURNAL, SharedMemory)
        rows, _ = _mapped(mine, rank, TABLE, mine.kind)
        content, _ = _mapped(mine, rank, CACHE, mine.kind)
        if rows.nbytes != mine.table.nbytes:
            raise NoRestore(f"the table of rank {rank} has another shape")
        if content.nbytes != layers_bytes(mine.layers):
            raise NoRestore(f"the cache of rank {rank} has another shape")
        self.journal = JournalReader(noted.numpy())
        self.table = rows.view(torch.int32).view(mine.table.shape)
        self.layers = as_layers(content, mine.layers)


_lost: dict[int, LostPool] = {}


def get_lost_pool(mine: AnchoredPool, rank: int, life: int) -> LostPool:
    """That of a life that has ended."""
    known = _lost.get(rank)
    if known is not None and known.life == life:
        return known
    found = LostPool(mine, rank)
    if (before := _lost.pop(rank, None)) is not None:
        # In a thread of its own: a driver that clears up behind a killed process takes its time to unmap anything.
        threading.Thread(target=[before].clear, name="eep-unmap-context", daemon=True).start()
    _lost[rank] = found
    return found


def _mapped(mine: AnchoredPool, rank: int, name: str, kind: type[Memory]) -> tuple[torch.Tensor, int]:
    found = mine.anchor.find(rank, name)
    if found is None:
        raise NoRestore(f"nothing of rank {rank} is held")
    held, descriptor = found
    memory = kind.adopt(descriptor, held.size)
    content = memory.bytes_at(0, held.size)
    memory.close()  # the tensor keeps the mapping
    return content, held.incarnation
