"""Where SGLang makes its cache and its table of rows: they get memory that outlives the process.

The first life of a rank decides how large the cache is. SGLang would measure how much memory is free, and to a later life
what it is about to take over looks taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches import hooks, options
from sglang_patches.rank import next_life
from sglang_patches.rank.kv import host_copy
from sglang_patches.rank.kv.anchored_pool import pool_of

_POOLS = "mem_cache.memory_pool."
_BUFFERS = {"MHATokenToKVPool": ("k_buffer", "v_buffer"), "MLATokenToKVPool": ("kv_buffer",)}
"""Kinds of cache that are kept, and the lists of their layers. Kinds derived from these have more than that."""


def register() -> None:
    hooks.hook("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", _keep_budget)
    hooks.hook(_POOLS + "MHATokenToKVPool._create_buffers_normal", _anchor_cache)
    hooks.hook(_POOLS + "MLATokenToKVPool._create_buffers", _anchor_cache)
    hooks.hook(_POOLS + "ReqToTokenPool.__init__", _anchor_table, "after")


def _keep_budget(original: Callable[..., int], sizes: Any, *arguments: Any, **named: Any) -> int:
    """How many bytes SGLang may use for caches."""
    pool = pool_of(sizes.device)
    if pool is None:
        return original(sizes, *arguments, **named)
    return pool.first_of(lambda: original(sizes, *arguments, **named))


def _anchor_table(result: None, table: Any, *_: Any, **__: Any) -> None:
    pool = pool_of(table.device)
    if pool is not None and pool.table is None:
        shape = tuple(table.req_to_token.shape)
        del table.req_to_token
        table.req_to_token = pool.take_table(shape)


def _anchor_cache(original: Callable[..., None], cache: Any, *arguments: Any, **named: Any) -> None:
    """SGLang makes its cache without memory, and is given the memory then: there may not be room for both."""
    pool = pool_of(cache.device)
    if pool is None or pool.layers:
        return original(cache, *arguments, **named)
    device, cache.device = cache.device, "meta"
    try:
        original(cache, *arguments, **named)
    finally:
        cache.device = device
    names = next(lists for lists in _BUFFERS.values() if hasattr(cache, lists[0]))
    layers = pool.take_cache(
        [layer for name in names for layer in getattr(cache, name)], options.required().most_slots > 0
    )
    for number, name in enumerate(names):
        count = len(layers) // len(names)
        setattr(cache, name, layers[number * count : (number + 1) * count])
    if _is_all(cache):
        pool.cache = cache
        next_life.when_free(lambda: host_copy.begin(pool))
    return None


def _is_all(cache: Any) -> bool:
    """Whether a row of each layer is all that the cache has of a token."""
    return type(cache).__name__ in _BUFFERS and getattr(cache, "kv_cache_layout", "nhd") == "nhd"
