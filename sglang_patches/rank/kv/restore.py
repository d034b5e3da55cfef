"""A request of a lost rank brings its context along: what is in the lost rank's cache is copied into this one's.

The copy becomes a prefix in SGLang's cache of prefixes, where the request finds it like any other. So only what is missing is
computed, one token as a rule. Where there is no such cache, :mod:`.own_prefix` does it. Whatever goes wrong, the request is
computed from its beginning, as it would be anyway.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch

from sglang_patches.rank.kv import own_prefix
from sglang_patches.rank.kv.anchored_pool import LEAST, AnchoredPool, get_pool
from sglang_patches.rank.kv.lost_context import LostContext, LostLife, leave
from sglang_patches.rank.kv.lost_pool import NoRestore
from sglang_patches.rank.kv.report import report_computed, report_restored
from sglang_patches.replayed_fields import LOST_LIFE


def take_lost_life(request: Any) -> LostLife | None:
    """Who served a request last, as the front end says. A second call returns None."""
    parameters = request.sampling_params.custom_params
    if not isinstance(parameters, dict) or LOST_LIFE not in parameters:
        return None
    rank, incarnation, wire = parameters.pop(LOST_LIFE)
    if set(parameters) <= {"__req__"}:
        request.sampling_params.custom_params = None
    return LostLife(int(rank), int(incarnation), str(wire))


def restore(scheduler: Any, request: Any, lost: LostLife) -> int:
    """How many tokens of its context the request need not have computed, as far as that is known now."""
    pool = get_pool()
    tokens = array("q", [*request.origin_input_ids, *request.output_ids])
    if pool is None or len(tokens) <= LEAST:
        return 0
    if getattr(scheduler.tree_cache, "disable", True):
        own_prefix.expect(request, lost)
        return 0
    try:
        context, count = _restore(scheduler, request, lost, pool, tokens)
    except Exception as problem:  # of SGLang's, too: the request can be served without
        report_computed(request, len(tokens), problem)
        leave(pool, lost)
        return 0
    context.leave()
    report_restored(request, lost, context, count, len(tokens))
    return count


def _restore(
    scheduler: Any, request: Any, lost: LostLife, pool: AnchoredPool, tokens: array[int]
) -> tuple[LostContext, int]:
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    context = LostContext(pool, lost, allocator.get_kvcache())
    count = context.tokens(len(tokens) - 1, tree.page_size)
    slots, unused = _allocate(scheduler, count), 0
    try:
        key = _key(request, tokens[:count])
        known = _known(tree, key)  # only now: what was given up for the new slots may have been among it
        context.copy(slots[len(known) :], first=len(known))
        unused = len(known)
    except BaseException:
        unused = count
        raise
    finally:
        if unused:
            allocator.free(slots[:unused])
    if len(known) < count:
        _insert(tree, allocator, key, known, slots[len(known) :])
    return context, count - len(known)


def _allocate(scheduler: Any, count: int) -> torch.Tensor:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = scheduler.token_to_kv_pool_allocator
    if (missing := count - allocator.available_size()) > 0:
        scheduler.tree_cache.evict(EvictParams(num_tokens=missing))
    slots: torch.Tensor | None = allocator.alloc(count)
    if slots is None:
        raise NoRestore(f"the cache has no room for {count} tokens")
    return slots


def _key(request: Any, tokens: array[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    salt = getattr(request, "cache_salt", None)  # older versions have it in the extra key
    return RadixKey(tokens, request.extra_key, **({"cache_salt": salt} if salt else {}))


def _known(tree: Any, key: Any) -> torch.Tensor:
    """The slots of the tokens that this rank has already."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    found = tree.match_prefix(MatchPrefixParams(key=key))
    if hasattr(found, "device_indices"):
        known: torch.Tensor = found.device_indices
    else:  # later versions than 0.5.21 tell the length only
        known = tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]
    return known.to(torch.int64)


def _insert(tree: Any, allocator: Any, key: Any, known: torch.Tensor, fresh: torch.Tensor) -> None:
    """From here on ``fresh`` is the tree's. If that fails half way, what the tree has not taken is free again."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    try:
        tree.insert(InsertParams(key=key, value=torch.cat([known, fresh]), prev_prefix_len=len(known)))
    except BaseException:
        taken = _known(tree, key)
        allocator.free(fresh[~torch.isin(fresh, taken)])
        raise
