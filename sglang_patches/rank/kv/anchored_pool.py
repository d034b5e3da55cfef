"""The cache of this rank, its table of rows and its journal, in memory that outlives the process.

The journal comes first: it says that what an earlier life had there no longer counts. Then the cache and the table are taken
over, whose old content nothing reads.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

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
    """The results of a step that was judged good are handed out: its tokens are in the cache."""
    if _pool is None or _pool.journal is None:
        return
    rows, requests, tokens = [], [], []
    for request in batch.reqs:
        count = _tokens_in_cache(request)
        if count > 0 and isinstance(row := row_of(request), int):
            rows.append(row)
            requests.append(_fingerprint_of(request))
            tokens.append(count)
    if rows:
        faults.at("kv.journal")
        _pool.journal.note(rows, requests, tokens)


def _tokens_in_cache(request: Any) -> int:
    """The newest token of an answer is not in the cache yet. A prompt that is not computed to its end does not count: with
    overlap, its next part may be under way, and is not judged."""
    answered = len(request.output_ids)
    return len(request.origin_input_ids) + answered - 1 if answered else 0


def _fingerprint_of(request: Any) -> tuple[int, int]:
    found: tuple[int, int] | None = getattr(request, "_eep_fingerprint", None)
    if found is None:
        found = request._eep_fingerprint = fingerprint(request.rid)
    return found


def _bytes_of(memory: Memory) -> torch.Tensor:
    return memory.bytes_at(0, memory.size)
