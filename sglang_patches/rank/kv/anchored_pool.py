"""The cache of this rank, its table of rows and its journal, in memory that outlives the process.

The journal comes first: it says that what an earlier life had there no longer counts. Then the cache and the table are taken
over, whose old content nothing reads. Requests of the life before may still fetch their contexts from there when a later life
is back. So that one has placeholders, and a journal that nobody reads, until they have done so
(:func:`sglang_patches.rank.next_life.when_free`). On a GPU only a spare needs them: any other life starts for seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eep.anchor.anchor import Anchor
from eep.control.launch.processes import RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from eep.data_plane.memory import Memory, MemoryKind, kind_of, memory_of, memory_with
from eep.data_plane.memory.row_copy import copy_rows
from eep.data_plane.memory.shm import SharedMemory
from eep.observe.metrics import MetricsWriter
from eep.requests.kv.kv_journal import JournalReader, KvJournal, journal_bytes
from sglang_patches import options
from sglang_patches.rank import next_life

CACHE, TABLE, JOURNAL, BUDGET = "kv", "rows", "journal", "kv-budget"
LEAST = 16
"""Fewer tokens of a context are computed sooner than they are found."""
_ALIGNED = 512
"""Each layer begins at a multiple of so many bytes, as torch would have it."""
HOST_ROWS = "_eep_rows"
"""The attribute of a list of rows on a GPU that has them on the host."""


class AnchoredPool:
    """What this process has anchored. Cache and table are on ``device``; the journal is the host's."""

    def __init__(self, device: str = "cpu") -> None:
        self.rank, self.life, self.device = int(os.environ[RANK]), 0, device
        self.kind = memory_of(device)
        self.kind_of_cache: MemoryKind = self.kind
        self._waits = next_life.is_awaited() or (device == "cpu" and next_life.is_later())
        """Whether this life takes over its memory only when the last one is not needed any more."""
        self.anchor = Anchor(Path(os.environ[CONTROL_DIRECTORY]), self.rank)
        self.metrics = MetricsWriter(f"rank-{self.rank}")
        self._places: dict[str, Memory] = {}
        """What a later life has in place of the memory of the last."""
        self._left: JournalReader | None = None
        """What the last life has noted."""
        self.backup_bytes = 0
        """How much host memory this rank has for a copy of its contexts."""
        self.journal: KvJournal | None = None
        self.table: torch.Tensor | None = None
        self.cache: Any = None
        """SGLang's, if all of it is in ``layers``."""
        self.layers: list[torch.Tensor] = []
        self.memory: Memory | None = None
        """That of ``layers``."""

        self._indices: torch.Tensor | None = None
        self._rows: npt.NDArray[np.int64] = np.empty(0, np.int64)
        next_life.when_begun(self._begin)
        next_life.when_free(self._take_places, self._is_free)

    def _begin(self, life: int) -> None:
        self.life = life
        self.anchor.begin(life)
        for figure, source in (("kv_restored", "anchor"), ("kv_restored", "host"), ("kv_recomputed", "")):
            self.metrics.add(figure, 0, source)

    def _is_free(self) -> bool:
        """Whether no request has its context in the caches of the last life any more. A few tokens are never fetched."""
        if self._left is None and self.table is not None:
            memory, _ = self.anchor.inherit(JOURNAL, journal_bytes(len(self.table)), SharedMemory)
            if memory is not None:
                self._left = JournalReader(_bytes_of(memory).numpy())
                memory.close()
        return self._left is None or not self._left.pending(LEAST + 1)

    def _take_places(self) -> None:
        self._left = None
        if self.table is not None and self._places:
            self.journal = self._take_journal(len(self.table))
        for name, place in self._places.items():
            self.anchor.attach(name, place.size, kind_of(place), place)
        if self.table is not None and self._places:
            self.table.zero_()
        self._places.clear()

    def rows_of(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """SGLang makes a new tensor only when other requests are in the batch. To see through a tensor takes as long as all
        else that is done after a step."""
        if indices is not self._indices:
            noted: torch.Tensor | None = getattr(indices, HOST_ROWS, None)
            self._indices, self._rows = indices, (indices if noted is None else noted).cpu().numpy()
        return self._rows

    def first_of(self, measure: Callable[[], int]) -> int:
        """What the first life of this rank has measured."""
        memory, _ = self.anchor.attach(BUDGET, 8, SharedMemory)
        kept = _bytes_of(memory).view(torch.int64)
        if not int(kept[0]):
            kept[0] = measure()
        return int(kept[0])

    def take_table(self, shape: tuple[int, ...]) -> torch.Tensor:
        rows = shape[0]
        if self._waits:
            self.journal = KvJournal(np.zeros(journal_bytes(rows), np.uint8), rows, 0)
        else:
            self.journal = self._take_journal(rows)
        self.table = _bytes_of(self._take(TABLE, math.prod(shape) * 4, self.kind)).view(torch.int32).view(shape).zero_()
        return self.table

    def _take_journal(self, rows: int) -> KvJournal:
        noted, _ = self.anchor.attach(JOURNAL, journal_bytes(rows), SharedMemory)
        return KvJournal(_bytes_of(noted).numpy(), rows, self.life)

    def _take(self, name: str, size: int, kind: MemoryKind) -> Memory:
        """What this rank is to have, or a placeholder of it."""
        if self._waits:
            self._places[name] = kind.placeholder(size)
            return self._places[name]
        memory, _ = self.anchor.attach(name, size, kind)
        return memory

    def take_cache(self, like: Sequence[torch.Tensor], gives_room: bool = False) -> list[torch.Tensor]:
        """Layers of the shapes and types of ``like``. ``gives_room``: the last part of each may be given up."""
        if gives_room:
            self.kind_of_cache = memory_with(self.device, ends_of(like), backed=True)
        self.memory = self._take(CACHE, layers_bytes(like), self.kind_of_cache)
        self.layers = as_layers(_bytes_of(self.memory), like)
        # A kernel that is loaded when it is first needed waits for those under way, and one of them may wait for a peer.
        none = torch.zeros(1, dtype=torch.int64, device=self.layers[0].device)
        copy_rows(self.layers, self.layers, none, none)
        return self.layers

    def hold_cache(self) -> None:
        """Have the keeper hold what the cache has by now, and nothing else of it."""
        if self.memory is not None and CACHE not in self._places:
            self.anchor.hold(CACHE, self.memory)


def layers_bytes(like: Sequence[torch.Tensor]) -> int:
    return sum(map(_aligned, like))


MOST_GIVEN = 0.5
"""What may be given up of a cache: the rest must do for any request."""
_STEPS, _MOST_PARTS = 4, 400


def ends_of(like: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Offsets and sizes of the parts of each layer that can be given up, from some row on to the end of the layer. Each part
    is memory of its own, so there are few where there are many layers."""
    steps = max(1, min(_STEPS, _MOST_PARTS // len(like)))
    found, offset = [], 0
    for each in like:
        row, rows = each[:1].nbytes, len(each)
        cuts = [rows - int(MOST_GIVEN * rows * step / steps) for step in range(steps, -1, -1)]
        found += [(offset + first * row, (end - first) * row) for first, end in pairwise(cuts)]
        offset += _aligned(each)
    return found


def as_layers(content: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors over bytes, one after the other, of the shapes and types of ``like``."""
    found, offset = [], 0
    for each in like:
        found.append(content[offset : offset + each.nbytes].view(each.dtype).view(each.shape))
        offset += _aligned(each)
    return found


def _aligned(layer: torch.Tensor) -> int:
    return -(-layer.nbytes // _ALIGNED) * _ALIGNED


_pool: AnchoredPool | None = None


def get_pool() -> AnchoredPool | None:
    """None where nothing is anchored: with ``--eep-keep-context off``, and in a process that is no rank."""
    return _pool


def pool_of(device: object) -> AnchoredPool | None:
    """The one of this process. The first call makes it, if it is wanted."""
    global _pool
    if _pool is None and CONTROL_DIRECTORY in os.environ and RANK in os.environ:
        asked = options.current()
        if asked is not None and asked.keeps_context:
            _pool = AnchoredPool(torch.device(str(device)).type)
            _pool.backup_bytes = asked.kv_backup // (asked.max_ranks - len(asked.remote_ranks))
    return _pool


def _bytes_of(memory: Memory) -> torch.Tensor:
    return memory.bytes_at(0, memory.size)
