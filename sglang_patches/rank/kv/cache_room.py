"""A part of the KV cache is given to expert slots for as long as few ranks are left. All of it is given up where a rank
serves experts only.

It is the end of the cache. What is free there goes out of circulation at once, the prefix cache is emptied, and what requests
still have there follows when they end. SGLang sees a smaller cache meanwhile, and runs fewer requests: those that it has no
room for wait, or are retracted and computed again. When all of the end is free, its memory is given up. Until then slots have
memory that the cache has not given up yet: a rank needs more for that long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from eep.errors import EepError
from eep.experts.room_record import RoomRecord
from sglang_patches import hooks
from sglang_patches.rank import next_life
from sglang_patches.rank.kv.anchored_pool import MOST_GIVEN, AnchoredPool, get_pool

logger = logging.getLogger(__name__)
_STEPS = 32
_LOOKS_EVERY = 16
"""Rounds of SGLang's loop between two looks for what has become free."""


def register() -> None:
    hooks.hook("managers.scheduler.Scheduler.process_input_requests", _before_requests, "before")
    hooks.hook("managers.scheduler.Scheduler.flush_cache", _after_flush, "after")


class CacheRoom:
    """``scheduler`` is SGLang's. Pages of its allocator are numbered from 1 on. ``report`` is told what is given."""

    def __init__(
        self, scheduler: Any, pool: AnchoredPool, report: Callable[[RoomRecord], None] = lambda record: None
    ) -> None:
        if pool.cache is None or pool.memory is None:
            raise EepError("the KV cache of this model is of a kind of which no part can be given up")
        self._allocator, self._tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        self._checker = getattr(scheduler, "invariant_checker", None)
        self._pool, self._memory = pool, pool.memory
        self._page = int(self._allocator.page_size)
        self._pages = int(self._allocator.size) // self._page
        self._page_bytes = self._page * sum(layer[:1].nbytes for layer in pool.layers)
        self._first = self._pages + 1
        """The first page that is to go."""
        self._given = torch.empty(0, dtype=torch.int64, device=pool.layers[0].device)
        """Pages that are out of circulation."""
        self._for_slots, self._serves_requests, self._report = 0, True, report
        self._rounds = 0

    @property
    def owed(self) -> int:
        """How many pages are still in use that are to go."""
        return self._pages + 1 - self._first - len(self._given)

    def take(self, size: int) -> None:
        """Give up so many bytes in all. EepError if the cache cannot do without."""
        pages, step = -(-size // self._page_bytes), max(1, self._pages // _STEPS)
        while pages <= MOST_GIVEN * self._pages and self._gain_of(pages) < size:
            pages += step
        if pages > MOST_GIVEN * self._pages:
            raise EepError(
                f"more slots need {size >> 20} MiB of the KV cache, and at most half of its "
                f"{self._pages * self._page_bytes >> 20} MiB can be given; bring ranks back, or give it more memory"
            )
        self._for_slots = pages
        self._resize()

    def leave(self, whole: bool) -> None:
        """Give up all of the cache, since no request needs it, or have back what slots do not have. EepError or OSError if
        its memory cannot be given up."""
        self._serves_requests = not whole
        self._resize()

    def _resize(self) -> None:
        pages = self._for_slots if self._serves_requests else self._pages
        before, self._first = self._first, self._pages + 1 - pages
        if self._first > before:
            self._return()
        else:
            self.absorb(evict=True)
        if not self._serves_requests:
            logger.warning("this rank gives up its KV cache, which no request needs while it serves experts only")
        elif pages:
            logger.warning(
                "this rank gives %d of the %d tokens of its KV cache to expert slots; %d of them are still in use",
                pages * self._page,
                self._pages * self._page,
                self.owed * self._page,
            )
        else:
            logger.warning("this rank has all of its KV cache again")
        self._pool.metrics.set("room_bytes", pages * self._page_bytes, str(self._pool.rank))
        self._tell()

    def flushed(self) -> None:
        """SGLang has made all of the cache free, also what is out of circulation."""
        self._count(len(self._given))
        self._given = self._given[:0]
        self.absorb(evict=False)

    def _tell(self) -> None:
        pages = self._pages + 1 - self._first
        self._report(RoomRecord(pages * self._page_bytes, len(self._given) * self._page))

    def look(self) -> None:
        """In every round of SGLang's loop."""
        self._rounds += 1
        if self._rounds % _LOOKS_EVERY == 0 and self.owed:
            self.absorb(evict=True)

    def absorb(self, *, evict: bool) -> None:
        """Take out of circulation what is free of the end."""
        if evict and (cached := int(self._tree.evictable_size())):
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self._tree.evict(EvictParams(num_tokens=cached))
        self._allocator.merge_and_sort_free()
        free = self._allocator.free_pages
        goes = free >= self._first
        found = free[goes]
        if not len(found):
            return
        self._allocator.free_pages = free[~goes]
        self._given = torch.cat((self._given, found))
        self._count(-len(found))
        if not self.owed:
            self.release()
        self._tell()

    def release(self) -> None:
        """Give up the memory of the end, if all of it is out of circulation."""
        if self.owed or not len(self._given):
            return
        for start, size in self._ranges(self._first):
            self._memory.give_up(start, size)
        self._pool.hold_cache()

    def _return(self) -> None:
        """What is out of circulation and no longer to go is free again."""
        back = self._given < self._first
        found = self._given[back]
        for start, size in self._ranges(int(found.min()) if len(found) else self._first, self._first):
            self._memory.back(start, size)
        self._pool.hold_cache()
        self._given = self._given[~back]
        self._allocator.free_pages = torch.cat((self._allocator.free_pages, found))
        self._count(len(found))

    def _ranges(self, first: int, end: int | None = None) -> list[tuple[int, int]]:
        """Where these pages lie, in every layer."""
        found = []
        for layer in self._pool.layers:
            row, start = layer[:1].nbytes, layer.data_ptr() - self._memory.address
            last = layer.shape[0] if end is None else end * self._page
            found.append((start + first * self._page * row, (last - first * self._page) * row))
        return found

    def _gain_of(self, pages: int) -> int:
        """How many bytes there are to be had if so many pages go."""
        return sum(self._memory.gain_of(start, size) for start, size in self._ranges(self._pages + 1 - pages))

    def _count(self, pages: int) -> None:
        """SGLang checks now and then that no token of the cache is lost."""
        if self._checker is not None and hasattr(self._checker, "max_total_num_tokens"):
            self._checker.max_total_num_tokens += pages * self._page


_room: CacheRoom | None = None
_scheduler: Any = None
_report: Callable[[RoomRecord], None] | None = None


def report_to(report: Callable[[RoomRecord], None]) -> None:
    """Tell this what the cache has given up, from the next change on."""
    global _report
    _report = report


def _tell(record: RoomRecord) -> None:
    if _report is not None:
        _report(record)


def _made() -> CacheRoom:
    global _room
    if _room is None:
        pool = get_pool()
        if pool is None or _scheduler is None:
            raise EepError("this rank has no KV cache of which a part can be given up")
        _room = CacheRoom(_scheduler, pool, _tell)
        if next_life.is_later():
            next_life.when_free(_room.release)  # until then this life has a placeholder in place of its cache
    return _room


def take(size: int) -> None:
    """Have so many bytes of the cache given up in all. EepError if that cannot be."""
    _made().take(size)


def leave_to_experts(whole: bool) -> None:
    """Give up all of the cache, where that can be, or have it again."""
    pool = get_pool()
    if pool is None or pool.memory is None or not pool.memory.gain_of(0, pool.memory.size):
        return  # a cache on a GPU is one allocation, of which the driver takes nothing back, unless room was asked for
    try:
        _made().leave(whole)
    except (EepError, OSError) as error:
        logger.warning("this rank keeps its KV cache: %s", error)


def _before_requests(scheduler: Any, *_: Any, **__: Any) -> None:
    global _scheduler
    if _scheduler is None and (pool := get_pool()) is not None:
        pool.metrics.set("room_bytes", 0, str(pool.rank))  # the last life may have said something else
    _scheduler = scheduler
    if _room is not None:
        _room.look()


def _after_flush(flushed: bool, *_: Any, **__: Any) -> bool:
    if flushed and _room is not None:
        _room.flushed()
    return flushed
