"""A request of a lost rank brings its context along: what is in the lost rank's cache is copied into this one's.

The copy becomes a prefix in SGLang's cache of prefixes, where the request finds it like any other. So only what is missing is
computed, one token as a rule. Whatever goes wrong, the request is computed from its beginning, as it would be anyway.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from eep import faults
from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.kv_journal import JournalLine, JournalReader
from eep.view import View
from sglang_patches.rank import rank_session
from sglang_patches.rank.kv.anchored_pool import CACHE, JOURNAL, TABLE, AnchoredPool, as_layers, get_pool
from sglang_patches.replayed_fields import LOST_LIFE

logger = logging.getLogger(__name__)
_KNOWN_WITHIN = 5.0
"""Seconds until this rank knows, too, that the other is gone."""
LEAST = 16
"""Fewer tokens are computed sooner than they are found."""


class NoRestore(Exception):
    """Why a context is computed instead."""


@dataclass(frozen=True)
class LostLife:
    rank: int
    incarnation: int
    wire: str

    def is_in(self, view: View) -> bool:
        return self.rank in view.active and view.incarnations[self.rank] == self.incarnation


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
    """How many tokens of its context the request need not have computed."""
    pool = get_pool()
    if pool is None or getattr(scheduler.tree_cache, "disable", True):
        return 0
    tokens = array("q", [*request.origin_input_ids, *request.output_ids])
    if len(tokens) <= LEAST:
        return 0
    count = 0
    try:
        count = _restore(scheduler, request, lost, pool, tokens)
        logger.info("request %s has %d of %d tokens from rank %d", request.rid, count, len(tokens), lost.rank)
    except Exception as reason:  # of SGLang's, too: the request can be served without
        logger.warning("the context of request %s is computed again, %d tokens: %s", request.rid, len(tokens), reason)
    pool.metrics.add("kv_restored", count)
    pool.metrics.add("kv_recomputed", len(tokens) - count)
    return count


def _restore(scheduler: Any, request: Any, lost: LostLife, pool: AnchoredPool, tokens: array[int]) -> int:
    tree = scheduler.tree_cache
    _check_is_gone(lost)
    reader = JournalReader(_attached(pool, lost.rank, JOURNAL).numpy())
    line = reader.find(lost.incarnation, lost.wire)
    if line is None:
        raise NoRestore(f"rank {lost.rank} has noted nothing of it")
    count: int = min(line.tokens, len(tokens) - 1) // tree.page_size * tree.page_size
    if count < LEAST:
        raise NoRestore(f"rank {lost.rank} has noted {line.tokens} tokens of it")
    faults.at("kv.restore.before")
    slots, unused = _allocate(scheduler, count), 0
    try:
        key = _key(request, tokens[:count])
        known = _known(tree, key)  # only now: what was given up for the new slots may have been among it
        _copy(pool, lost.rank, line, slots[len(known) :], first=len(known))
        if not reader.stands(line):
            raise NoRestore(f"the memory of rank {lost.rank} was taken over meanwhile")
        unused = len(known)
    except BaseException:
        unused = count
        raise
    finally:
        if unused:
            scheduler.token_to_kv_pool_allocator.free(slots[:unused])
    if len(known) < count:
        _insert(tree, key, torch.cat([known, slots[len(known) :]]), len(known))
    faults.at("kv.restore.after")
    return count - len(known)


def _check_is_gone(lost: LostLife) -> None:
    """A rank that is in may change what it has while it is copied. The front end may know of a loss before this rank does,
    which can run no step before it has the view without the lost one: so there is nothing to miss."""
    session = rank_session.get_session().joined
    if session is None:
        raise NoRestore("this rank is not in yet")
    view: View | None = session.view
    if view is not None and lost.is_in(view):
        session.member.wait_for_view(after=view.epoch, within=_KNOWN_WITHIN)
        view = session.member.newest_view
    if view is None or lost.is_in(view):
        raise NoRestore(f"rank {lost.rank} still has it")


def _attached(pool: AnchoredPool, rank: int, name: str) -> torch.Tensor:
    found = pool.anchor.find(rank, name)
    if found is None:
        raise NoRestore(f"nothing of rank {rank} is held")
    held, descriptor = found
    memory = SharedMemory.adopt(descriptor, held.size)
    content = memory.bytes_at(0, held.size)
    memory.close()  # the tensor keeps the mapping
    return content


def _allocate(scheduler: Any, count: int) -> torch.Tensor:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = scheduler.token_to_kv_pool_allocator
    if (missing := count - allocator.available_size()) > 0:
        scheduler.tree_cache.evict(EvictParams(num_tokens=missing))
    slots: torch.Tensor | None = allocator.alloc(count)
    if slots is None:
        raise NoRestore(f"the cache has no room for {count} tokens")
    return slots


def _copy(pool: AnchoredPool, rank: int, line: JournalLine, slots: torch.Tensor, first: int) -> None:
    """The entries of the tokens from ``first`` on."""
    if not len(slots):
        return
    assert pool.table is not None
    table = _attached(pool, rank, TABLE)
    if table.nbytes != pool.table.nbytes:
        raise NoRestore(f"the table of rank {rank} has another shape")
    there = table.view(torch.int32).view(pool.table.shape)[line.row, first : first + len(slots)].long()
    content = _attached(pool, rank, CACHE)
    if content.nbytes != sum(layer.nbytes for layer in pool.layers):
        raise NoRestore(f"the cache of rank {rank} has another shape")
    if int(there.min()) < 0 or int(there.max()) >= len(pool.layers[0]):
        raise NoRestore(f"the table of rank {rank} names slots that there are not")
    for number, (mine, other) in enumerate(zip(pool.layers, as_layers(content, pool.layers), strict=True)):
        mine[slots] = other[there]
        if number == 0:
            faults.at("kv.restore.mid")


def _key(request: Any, tokens: array[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    salt = getattr(request, "cache_salt", None)  # older versions have it in the extra key
    return RadixKey(tokens, request.extra_key, **({"cache_salt": salt} if salt else {}))


def _known(tree: Any, key: Any) -> torch.Tensor:
    """The slots of the tokens that this rank has already."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    known: torch.Tensor = tree.match_prefix(MatchPrefixParams(key=key)).device_indices
    return known.to(torch.int64)


def _insert(tree: Any, key: Any, slots: torch.Tensor, known: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=known))
