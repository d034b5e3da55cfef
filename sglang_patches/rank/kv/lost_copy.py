"""What a lost rank has copied to host memory of a request: for when its own cache is gone, too."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.copy_index import CopyReader
from eep.requests.kv.copy_layout import PAGE
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.copied_pages import COPY, PageBuffers, kind_of, layout_of, unload
from sglang_patches.rank.kv.lost_pool import NoRestore, mapped

_AT_ONCE = 16 << 20
_buffers: WeakKeyDictionary[AnchoredPool, PageBuffers] = WeakKeyDictionary()


def prepare(pool: AnchoredPool) -> PageBuffers:
    """What a restore needs is made at the beginning: pinned memory that is made later waits for kernels under way, and one of
    them may wait for a peer."""
    if pool not in _buffers:
        page_bytes = layout_of(pool.layers).page_bytes
        _buffers[pool] = PageBuffers(pool.layers[0].device, page_bytes, max(1, _AT_ONCE // page_bytes))
    return _buffers[pool]


class CopiedContext:
    """Of one request. NoRestore if there is none."""

    source, where = "host", "the host copy of rank"

    def __init__(self, mine: AnchoredPool, rank: int, life: int, wire: str) -> None:
        self._mine = mine
        self._page_bytes = layout_of(mine.layers).page_bytes
        content, _ = mapped(mine, rank, COPY, mine.backup_bytes, SharedMemory)
        self._reader = CopyReader(content.numpy(), self._page_bytes, kind_of(mine.layers))
        found = self._reader.find(life, wire)
        if found is None:
            raise NoRestore(f"rank {rank} has copied nothing of it to host memory")
        self._found, self.tokens = found, found.tokens

    def copy(self, slots: torch.Tensor, first: int) -> None:
        """ValueError if a page is damaged. What is copied before the other pages are looked at is the caller's to drop."""
        buffers = prepare(self._mine)
        end = first + len(slots)
        last = -(-end // PAGE)
        for page in range(first // PAGE, last, buffers.most):
            count = min(buffers.most, last - page)
            content = buffers.bring(count, partial(self._reader.take, self._found, page))
            start, stop = max(first, page * PAGE), min(end, (page + count) * PAGE)
            unload(content, self._mine.layers, slots[start - first : stop - first], start - page * PAGE)

    def leave(self) -> None:
        """No life of a rank waits for its copy."""

    def check(self) -> None:
        """Every page was looked at when it was taken."""
