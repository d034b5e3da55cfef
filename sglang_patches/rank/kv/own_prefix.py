"""Where SGLang has no cache of prefixes (``--disable-radix-cache``), a request that moves begins with slots of its own.

They are its prefix, and SGLang frees them with all else that the request has. The copy is made when SGLang is about to take
the request into a batch. If SGLang does not, the slots go back at once: no request holds memory while it waits, for which
those that run may be waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sglang_patches import hooks
from sglang_patches.rank.kv.anchored_pool import get_pool
from sglang_patches.rank.kv.lost_context import LostContext, LostLife, leave
from sglang_patches.rank.kv.lost_pool import NoRestore
from sglang_patches.rank.kv.report import report_computed, report_restored

T = TypeVar("T")
_LOST, _SLOTS = "_eep_lost_life", "_eep_slots"


def register() -> None:
    hooks.hook("managers.schedule_policy.PrefillAdder.add_one_req", _add)
    hooks.hook("mem_cache.unified_radix_cache.UnifiedRadixCache.prefix_device_indices", _indices)


def expect(request: Any, lost: LostLife) -> None:
    """The request is to have what this life had of it, when it is its turn."""
    setattr(request, _LOST, lost)


def _add(original: Callable[..., T], adder: Any, request: Any, *arguments: Any, **named: Any) -> T:
    """SGLang takes a waiting request into the next batch, if there is room."""
    lost: LostLife | None = getattr(request, _LOST, None)
    if lost is None:
        return original(adder, request, *arguments, **named)
    allocator = adder.token_to_kv_pool_allocator
    tokens = len(request.full_untruncated_fill_ids)
    try:
        context, slots = _copied(adder, request, lost, tokens)
    except Exception as reason:  # of SGLang's, too: the request can be served without
        delattr(request, _LOST)
        report_computed(request, tokens, reason)
        if (pool := get_pool()) is not None:
            leave(pool, lost)
        return original(adder, request, *arguments, **named)
    if slots is not None:
        _begin_with(request, slots)
    result = original(adder, request, *arguments, **named)
    if adder.can_run_list and adder.can_run_list[-1] is request:
        delattr(request, _LOST)
        context.leave()
        if slots is None:
            report_computed(request, tokens, "there was no room to copy it")
        else:
            report_restored(request, lost, context, len(slots), tokens)
    elif slots is not None:
        _begin_with(request, slots[:0])
        allocator.free(slots)
    return result


def _copied(adder: Any, request: Any, lost: LostLife, tokens: int) -> tuple[LostContext, torch.Tensor | None]:
    """The context of the request, and new slots with it; None if there are not enough. NoRestore if it cannot be had."""
    pool, allocator = get_pool(), adder.token_to_kv_pool_allocator
    assert pool is not None
    context = LostContext(pool, lost, allocator.get_kvcache())
    count = context.tokens(request._compute_max_prefix_len(tokens), adder.tree_cache.page_size)
    _check_can_begin_with(adder, request, tokens - count)
    slots: torch.Tensor | None = allocator.alloc(count) if count <= allocator.available_size() else None
    if slots is None:
        return context, None
    try:
        context.copy(slots)
    except BaseException:
        allocator.free(slots)
        raise
    return context, slots


def _check_can_begin_with(adder: Any, request: Any, missing: int) -> None:
    """Of a request that ignores end tokens, SGLang computes a prompt in parts only if it has no prefix, and asserts that."""
    room = adder.rem_chunk_tokens
    if request.sampling_params.ignore_eos and room is not None and missing > room:
        raise NoRestore(f"{missing} tokens are missing, and the batch has room for {room}")


def _begin_with(request: Any, slots: torch.Tensor) -> None:
    if hasattr(request, "prefix_indices"):
        request.prefix_indices = slots
    else:  # later versions than 0.5.21 know the length only, and ask for the slots when they fill the row
        request.prefix_len = len(slots)
        setattr(request, _SLOTS, slots)


def _indices(original: Callable[..., torch.Tensor], tree: Any, request: Any) -> torch.Tensor:
    slots: torch.Tensor | None = getattr(request, _SLOTS, None)
    return slots if tree.disable and slots is not None else original(tree, request)
