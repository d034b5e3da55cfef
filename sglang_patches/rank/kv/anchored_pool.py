"""The cache of this rank, its table of rows and its journal, in memory that outlives the process.

The journal comes first: it says that what an earlier life had there no longer counts. Then the cache and the table are taken
over, whose old content nothing reads.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eep import faults
from eep.anchor.anchor import Anchor
from eep.control.launch.processes import INCARNATION, RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from eep.data_plane.memory import Memory
from eep.data_plane.memory.shm import SharedMemory
from eep.observe.metrics import MetricsWriter
from eep.requests.kv.kv_journal import KvJournal, fingerprint, journal_bytes
from sglang_patches import hooks

CACHE, TABLE, JOURNAL = "kv", "rows", "journal"
_POOLS = "mem_cache.memory_pool."


def register() -> None:
    hooks.hook(_POOLS + "MHATokenToKVPool._create_buffers_normal", _anchor_cache, "after")
    hooks.hook(_POOLS + "ReqToTokenPool.__init__", _anchor_table, "after")
    hooks.hook(_POOLS + "ReqToTokenPool.free", _withdraw, "before")
    hooks.hook(_POOLS + "ReqToTokenPool.clear", _withdraw_all, "before")


class AnchoredPool:
    """What this process has anchored."""

    def __init__(self) -> None:
        self.rank, self.life = int(os.environ[RANK]), int(os.environ[INCARNATION])
        self.anchor = Anchor(Path(os.environ[CONTROL_DIRECTORY]), self.rank, self.life)
        self.metrics = MetricsWriter(f"rank-{self.rank}")
        for figure in ("kv_restored", "kv_recomputed"):
            self.metrics.add(figure, 0)
        self.journal: KvJournal | None = None
        self.table: torch.Tensor | None = None
        self.layers: list[torch.Tensor] = []
        """Keys of each layer, then values of each layer."""

        self._indices: torch.Tensor | None = None
        self._rows: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def rows_of(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """SGLang makes a new tensor only when other requests are in the batch. To see through a tensor takes as long as all
        else that is done after a step."""
        if indices is not self._indices:
            self._indices, self._rows = indices, indices.numpy()
        return self._rows

    def take_table(self, shape: tuple[int, ...]) -> torch.Tensor:
        rows = shape[0]
        noted, _ = self.anchor.attach(JOURNAL, journal_bytes(rows), SharedMemory)
        self.journal = KvJournal(_bytes_of(noted).numpy(), rows, self.life)
        memory, _ = self.anchor.attach(TABLE, math.prod(shape) * 4, SharedMemory)
        self.table = _bytes_of(memory).view(torch.int32).view(shape).zero_()
        return self.table

    def take_cache(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        memory, _ = self.anchor.attach(CACHE, sum(each.nbytes for each in (*keys, *values)), SharedMemory)
        self.layers = as_layers(_bytes_of(memory), [*keys, *values])


def as_layers(content: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors over bytes, one after the other, of the shapes and types of ``like``."""
    found, offset = [], 0
    for each in like:
        found.append(content[offset : offset + each.nbytes].view(each.dtype).view(each.shape))
        offset += each.nbytes
    return found


_pool: AnchoredPool | None = None


def get_pool() -> AnchoredPool | None:
    """None where nothing is anchored: on a GPU, and in a process that is no rank."""
    return _pool


def _is_wanted(device: object) -> bool:
    return str(device).startswith("cpu") and CONTROL_DIRECTORY in os.environ and RANK in os.environ


def _pool_of(device: object) -> AnchoredPool | None:
    global _pool
    if _pool is None and _is_wanted(device):
        _pool = AnchoredPool()
    return _pool


def _anchor_table(result: None, table: Any, *_: Any, **__: Any) -> None:
    pool = _pool_of(table.device)
    if pool is not None and pool.table is None:
        table.req_to_token = pool.take_table(tuple(table.req_to_token.shape))


def _anchor_cache(result: None, cache: Any, *_: Any, **__: Any) -> None:
    pool = _pool_of(cache.device)
    if pool is not None and not pool.layers:
        pool.take_cache(cache.k_buffer, cache.v_buffer)
        count = len(cache.k_buffer)
        cache.k_buffer, cache.v_buffer = pool.layers[:count], pool.layers[count:]


def row_of(request: Any) -> int | None:
    """The row of a request in the table. Later versions than 0.5.17 have it in ``kv``, which 0.5.17 has too."""
    row: int | None = getattr(request.kv if hasattr(request.kv, "req_pool_idx") else request, "req_pool_idx", None)
    return row


def _withdraw(table: Any, request: Any, *_: Any, **__: Any) -> None:
    if _pool is not None and _pool.journal is not None and isinstance(row := row_of(request), int):
        _pool.journal.withdraw(row)


def _withdraw_all(table: Any, *_: Any, **__: Any) -> None:
    if _pool is not None and _pool.journal is not None:
        _pool.journal.withdraw_all()


def note(batch: Any) -> None:
    """The results of a step that was judged good are handed out: its tokens are in the cache. They may be a part of a prompt.

    SGLang's batch is as it was launched, and a request may have lost its row since. The row may have another owner, but none
    with a name: that one's first step was launched later, and steps are handed out in the order of their launch.
    """
    if _pool is None or _pool.journal is None or not batch.reqs:
        return
    rows = _pool.rows_of(batch.req_pool_indices)
    faults.at("kv.journal")
    if not batch.forward_mode.is_decode():
        for request, row in zip(batch.reqs, rows.tolist(), strict=False):
            if row_of(request) == row:
                _pool.journal.name(row, fingerprint(request.rid))
    _pool.journal.count(rows, batch.seq_lens_cpu.numpy())


def _bytes_of(memory: Memory) -> torch.Tensor:
    return memory.bytes_at(0, memory.size)
