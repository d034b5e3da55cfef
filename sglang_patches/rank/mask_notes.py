"""In a scheduler: requests that are computed while experts are masked are marked, and leave no context behind.

A request is marked for all of its life: what it has in the cache stays what it is. If its rank is lost, another one computes
it anew, from its prompt and what was delivered of its answer. That may be exact again; what was delivered before is not, so
the front end remembers the mark.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import mask_mark
from sglang_patches.rank.kv.anchored_pool import get_pool
from sglang_patches.rank.kv.context_notes import row_of


def note(batch: Any) -> None:
    """A step runs while experts are masked. A batch of another kind than SGLang's scheduler has names no requests."""
    for request in getattr(batch, "reqs", None) or ():
        if not mask_mark.is_marked(request):
            mask_mark.mark(request)
            _withdraw(request)


def _withdraw(request: Any) -> None:
    pool = get_pool()
    if pool is not None and pool.journal is not None and isinstance(row := row_of(request), int):
        pool.journal.withdraw(row)
