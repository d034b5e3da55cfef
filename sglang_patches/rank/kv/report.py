"""What became of the context of a request that moved, in the log and in the figures."""

from __future__ import annotations

import logging
from typing import Any

from eep import faults
from sglang_patches.rank.kv.anchored_pool import get_pool
from sglang_patches.rank.kv.lost_context import LostLife

logger = logging.getLogger(__name__)


def report(request: Any, lost: LostLife, count: int, tokens: int, problem: object = None) -> None:
    """It has ``count`` of its tokens from the lost rank. ``problem``: why it has none."""
    if problem is None:
        faults.at("kv.restore.after")
        logger.info("request %s has %d of %d tokens from rank %d", request.rid, count, tokens, lost.rank)
    else:
        logger.warning("the context of request %s is computed again, %d tokens: %s", request.rid, tokens, problem)
    pool = get_pool()
    assert pool is not None
    pool.metrics.add("kv_restored", count)
    pool.metrics.add("kv_recomputed", tokens - count)
