"""What a lost rank has copied to host memory of a request: for when its own cache is gone, too."""

from __future__ import annotations

import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.copy_index import CopyReader
from eep.requests.kv.copy_layout import PAGE
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.copied_pages import COPY, kind_of, layout_of, unload
from sglang_patches.rank.kv.lost_pool import NoRestore, mapped

_AT_ONCE = 32 << 20


class CopiedContext:
    """Of one request. NoRestore if there is none."""

    source, where = "host", "the host copy of rank"

    def __init__(self, mine: AnchoredPool, rank: int, life: int, wire: str) -> None:
        self._mine = mine
        self._page_bytes = layout_of(mine.layers).page_bytes
        content, _ = mapped(mine, rank, COPY, SharedMemory)
        self._reader = CopyReader(content.numpy(), self._page_bytes, kind_of(mine.layers))
        found = self._reader.find(life, wire)
        if found is None:
            raise NoRestore(f"rank {rank} has copied nothing of it to host memory")
        self._found, self.tokens = found, found.tokens

    def copy(self, slots: torch.Tensor, first: int) -> None:
        """ValueError if a page is damaged. What is copied before the other pages are looked at is the caller's to drop."""
        end, some = first + len(slots), max(1, _AT_ONCE // self._page_bytes)
        for page in range(first // PAGE, -(-end // PAGE), some):
            content = torch.from_numpy(self._reader.take(self._found, page, page + some)).view(-1).to(slots.device)
            start, stop = max(first, page * PAGE), min(end, (page + some) * PAGE)
            unload(content, self._mine.layers, slots[start - first : stop - first], start - page * PAGE)

    def leave(self) -> None:
        """No life of a rank waits for its copy."""

    def check(self) -> None:
        """Every page was looked at when it was taken."""
