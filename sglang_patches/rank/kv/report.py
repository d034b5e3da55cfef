"""What became of the context of a request that moved, in the log and in the figures."""

from __future__ import annotations

import logging
from typing import Any

from eep import faults
from sglang_patches.rank.kv.anchored_pool import get_pool
from sglang_patches.rank.kv.lost_context import LostContext, LostLife

logger = logging.getLogger(__name__)


def report_restored(request: Any, lost: LostLife, context: LostContext, count: int, tokens: int) -> None:
    """It has ``count`` of its tokens from there."""
    faults.at("kv.restore.after")
    origin = context.origin
    logger.info("request %s has %d of %d tokens from %s %d", request.rid, count, tokens, origin.where, lost.rank)
    _add("kv_restored", count, origin.source)
    _add("kv_recomputed", tokens - count)


def report_computed(request: Any, tokens: int, why: object) -> None:
    logger.warning("the context of request %s is computed again, %d tokens: %s", request.rid, tokens, why)
    _add("kv_recomputed", tokens)


def _add(figure: str, tokens: int, source: str = "") -> None:
    pool = get_pool()
    assert pool is not None
    pool.metrics.add(figure, tokens, source)
