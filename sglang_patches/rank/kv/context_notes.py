"""What the journal says of each request: written when a step is judged good, withdrawn before a row is given up."""

from __future__ import annotations

from typing import Any

from eep import faults
from eep.requests.kv.kv_journal import fingerprint
from sglang_patches import hooks
from sglang_patches.mask_mark import is_marked
from sglang_patches.rank.kv.anchored_pool import HOST_ROWS, get_pool

_POOLS = "mem_cache.memory_pool."


def register() -> None:
    hooks.hook(_POOLS + "ReqToTokenPool.free", _withdraw, "before")
    hooks.hook(_POOLS + "ReqToTokenPool.clear", _withdraw_all, "before")


def row_of(request: Any) -> int | None:
    """The row of a request in the table. Later versions than 0.5.17 have it in ``kv``, which 0.5.17 has too."""
    row: int | None = getattr(request.kv if hasattr(request.kv, "req_pool_idx") else request, "req_pool_idx", None)
    return row


def _withdraw(table: Any, request: Any, *_: Any, **__: Any) -> None:
    pool = get_pool()
    if pool is not None and pool.journal is not None and isinstance(row := row_of(request), int):
        pool.journal.withdraw(row)


def _withdraw_all(table: Any, *_: Any, **__: Any) -> None:
    pool = get_pool()
    if pool is not None and pool.journal is not None:
        pool.journal.withdraw_all()


def launched(batch: Any) -> None:
    """SGLang launches a step. The batch that it hands the results out with knows the rows only where the step ran."""
    if get_pool() is not None and batch.req_pool_indices is not None and not batch.req_pool_indices.is_cpu:
        setattr(batch.req_pool_indices, HOST_ROWS, batch.req_pool_indices_cpu)


def note(batch: Any) -> None:
    """The results of a step that was judged good are handed out: its tokens are in the cache. They may be a part of a prompt.

    SGLang's batch is as it was launched, and a request may have lost its row since. The row may have another owner, but none
    with a name: that one's first step was launched later, and steps are handed out in the order of their launch.
    """
    pool = get_pool()
    if pool is None or pool.journal is None or not batch.reqs:
        return
    rows = pool.rows_of(batch.req_pool_indices)
    faults.at("kv.journal")
    if not batch.forward_mode.is_decode():
        for request, row in zip(batch.reqs, rows.tolist(), strict=False):
            if row_of(request) == row and not is_marked(request):
                pool.journal.name(row, fingerprint(request.rid))
    pool.journal.count(rows, batch.seq_lens_cpu.numpy())
