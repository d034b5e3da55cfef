"""Contexts of this rank, copied to host memory as they grow (``--eep-kv-backup``), for when its GPU is lost with it.

A thread looks into the journal again and again. It copies whole pages of tokens that were judged good, and looks then
whether the request still has its row. No step knows of it.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from eep import faults
from eep.data_plane.memory.page_copy import PageCopy
from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.copy_index import CopyWriter, bytes_for, pages_in
from eep.requests.kv.copy_layout import PAGE
from eep.requests.kv.copy_plan import CopyPlan
from eep.requests.kv.copy_record import CopyRecord, CopyTeller
from sglang_patches.rank.kv import lost_copy
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.copied_pages import COPY, kind_of, layout_of

logger = logging.getLogger(__name__)
_PAUSE_S = 0.1
"""Between passes, when all is copied. The tokens of so short a time are computed again in one step, which a request that
moves takes anyway."""
_PASS_TOKENS = 4096
_PASS_BYTES = 32 << 20
"""What is copied at once, at most: the next pass sees which requests have ended meanwhile."""
_TELL_S = 1.0


class HostCopy:
    def __init__(self, pool: AnchoredPool, size: int) -> None:
        """``size``: bytes of host memory. SystemExit if not even a page fits."""
        assert pool.journal is not None
        assert pool.table is not None
        self._journal, self._metrics, self._rank = pool.journal, pool.metrics, pool.rank
        page_bytes = layout_of(pool.layers).page_bytes
        pages = pages_in(size, page_bytes)
        if pages < 1:
            raise SystemExit(
                f"--eep-kv-backup leaves {size} bytes for rank {pool.rank}, and {PAGE} tokens of this model take "
                f"{bytes_for(1, page_bytes)}; give more, or leave it out"
            )
        memory, _ = pool.anchor.attach(COPY, size, SharedMemory)
        self._writer = CopyWriter(memory.bytes_at(0, size).numpy(), page_bytes, kind_of(pool.layers), pool.life)
        rows, self._context = pool.table.shape
        self._plan = CopyPlan(rows, self._context, pages)
        self._most = max(1, min(_PASS_TOKENS // PAGE, _PASS_BYTES // page_bytes))
        content = torch.from_numpy(self._writer.pages.reshape(-1))
        self._copy_pages = PageCopy(
            pool.table, pool.layers, content, page_bytes=page_bytes, page_tokens=PAGE, most=self._most
        )
        self._teller = CopyTeller(pool.anchor.directory, pool.rank, pool.life)
        self._room = (size, pages * PAGE)
        self._told, self._told_at = (-1, -1), -_TELL_S
        self._tell()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eep-kv-copy", daemon=True)
        logger.info("contexts of rank %d are copied to host memory, up to %d tokens", pool.rank, pages * PAGE)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10)
        self._teller.close()

    def copy_some(self) -> bool:
        """One pass. Whether there is more to do at once."""
        seen = self._journal.look()
        moves = self._plan.next(seen.turns, seen.tokens, self._most)
        if len(moves.given_up):
            self._writer.clear(moves.given_up)
        if len(moves.pages):
            copied = self._copy_pages(moves.rows * self._context + moves.numbers * PAGE, moves.pages)
            faults.at("kv.backup.mid")
            same = self._journal.turns[moves.rows] == seen.turns[moves.rows]
            whole = self._plan.settle(moves, copied & same)
            self._writer.enter(moves.pages[whole], seen.requests[moves.rows[whole]], moves.numbers[whole])
        self._tell()
        return len(moves.pages) == self._most

    def _run(self) -> None:
        try:
            while not self._closed.wait(0 if self.copy_some() else _PAUSE_S):
                pass
        except Exception:
            logger.exception("contexts of rank %d are no longer copied to host memory", self._rank)

    def _tell(self) -> None:
        now, figures = time.monotonic(), (self._plan.covered, self._plan.behind)
        if figures != self._told and now - self._told_at >= _TELL_S:
            self._told, self._told_at = figures, now
            for name, value in zip(("kv_backup_covered", "kv_backup_lag"), figures, strict=True):
                self._metrics.set(name, value, str(self._rank))
            self._teller.tell(CopyRecord(*self._room, *figures))


_copy: HostCopy | None = None


def begin(pool: AnchoredPool) -> None:
    """Table, journal and cache of this rank are there."""
    global _copy
    if pool.backup_bytes and _copy is None:
        lost_copy.prepare(pool)
        _copy = HostCopy(pool, pool.backup_bytes)
        _copy.start()
