"""The memory of a lost rank, mapped into this process. It stays mapped for the next request of the same life."""

from __future__ import annotations

import threading

import torch

from eep.data_plane.memory import MemoryKind
from eep.data_plane.memory.row_copy import copy_rows
from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.kv_journal import JournalReader, journal_bytes
from sglang_patches.rank.kv.anchored_pool import CACHE, JOURNAL, TABLE, AnchoredPool, as_layers, layers_bytes


class NoRestore(Exception):
    """Why a context is computed instead."""


class LostPool:
    """Journal, table and cache of ``rank``. NoRestore if they are not held, or not like those of this rank."""

    def __init__(self, mine: AnchoredPool, rank: int) -> None:
        assert mine.table is not None
        noted, self.life = mapped(mine, rank, JOURNAL, journal_bytes(len(mine.table)), SharedMemory)
        rows, _ = mapped(mine, rank, TABLE, mine.table.nbytes, mine.kind)
        content, _ = mapped(mine, rank, CACHE, layers_bytes(mine.layers), mine.kind_of_cache)
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


class AnchoredContext:
    """What a lost life had of one request in its cache. NoRestore if that is nothing."""

    source, where = "anchor", "rank"

    def __init__(self, mine: AnchoredPool, rank: int, life: int, wire: str) -> None:
        self._mine, self._rank = mine, rank
        self._lost = get_lost_pool(mine, rank, life)
        line = self._lost.journal.find(life, wire)
        if line is None:
            raise NoRestore(f"rank {rank} has noted nothing of it")
        self._line, self.tokens = line, line.tokens

    def copy(self, slots: torch.Tensor, first: int) -> None:
        there = self._lost.table[self._line.row, first : first + len(slots)].cpu().long()
        if int(there.min()) < 0 or int(there.max()) >= len(self._mine.layers[0]):
            raise NoRestore(f"the table of rank {self._rank} names slots that there are not")
        copy_rows(self._mine.layers, self._lost.layers, slots, there.to(slots.device))

    def leave(self) -> None:
        """This context is not needed any more."""
        self._lost.journal.take(self._line)

    def check(self) -> None:
        """NoRestore if what was copied may not be the request's."""
        if not self._lost.journal.stands(self._line):
            raise NoRestore(f"the memory of rank {self._rank} was taken over meanwhile")


def mapped(mine: AnchoredPool, rank: int, name: str, size: int, kind: MemoryKind) -> tuple[torch.Tensor, int]:
    """What a rank has left under a name, and the life that had it. NoRestore if there is nothing of this size."""
    found = mine.anchor.look_at(rank, name, size, kind)
    if found is None:
        raise NoRestore(f"nothing of rank {rank} is held as {name} that is like what this rank has")
    memory, life = found
    content = memory.bytes_at(0, size)
    memory.close()  # the tensor keeps the mapping
    return content, life
