"""The end of the KV cache is given up and comes back, whatever uses it. With an allocator that looks like SGLang's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eep.data_plane.memory import MemoryKind
from eep.data_plane.memory.parted import NONE, PartedKind, PartedMemory
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.room_record import RoomRecord
from sglang_patches.rank.kv import cache_room
from sglang_patches.rank.kv.anchored_pool import as_layers, ends_of, layers_bytes
from sglang_patches.rank.kv.cache_room import CacheRoom
from tests.host_driver import HostDriver

TOKENS, ROW = 4096, 256
LAYERS = 3


class Allocator:
    def __init__(self) -> None:
        self.size, self.page_size = TOKENS, 1
        self.free_pages = torch.arange(1, TOKENS + 1)
        self.release_pages = torch.empty(0, dtype=torch.int64)

    def merge_and_sort_free(self) -> None:
        self.free_pages = torch.cat((self.free_pages, self.release_pages)).sort().values
        self.release_pages = torch.empty(0, dtype=torch.int64)

    def alloc(self, count: int) -> torch.Tensor:
        found, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return found

    def free(self, rows: torch.Tensor) -> None:
        self.release_pages = torch.cat((self.release_pages, rows))


class Tree:
    """A prefix cache."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.cached = allocator, torch.empty(0, dtype=torch.int64)

    def evictable_size(self) -> int:
        return len(self.cached)

    def evict(self, params: Any) -> None:
        assert params.num_tokens == len(self.cached)
        self.allocator.free(self.cached)
        self.cached = self.cached[:0]


class Cache:
    def __init__(self, in_parts: bool = False) -> None:
        like = [torch.empty(TOKENS + 1, ROW, dtype=torch.uint8, device="meta") for _ in range(LAYERS)]
        kind: MemoryKind = PartedKind(tuple(ends_of(like))) if in_parts else SharedMemory
        self.memory = kind.create("cache", layers_bytes(like))
        layers = as_layers(self.memory.bytes_at(0, self.memory.size), like)
        for layer in layers:
            layer.fill_(7)
        self.figures: dict[str, float] = {}
        self.pool: Any = SimpleNamespace(
            cache=object(),
            memory=self.memory,
            layers=layers,
            rank=0,
            hold_cache=lambda: None,
            metrics=SimpleNamespace(set=lambda figure, value, label: self.figures.update({figure: value})),
        )
        self.allocator = Allocator()
        self.tree = Tree(self.allocator)
        self.checker = SimpleNamespace(max_total_num_tokens=TOKENS)
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree, invariant_checker=self.checker
        )
        self.room = CacheRoom(self.scheduler, self.pool)

    def in_memory(self) -> int:
        return os.fstat(self.memory.fd).st_blocks * 512

    def check(self, used: int = 0) -> None:
        """No token is lost, as SGLang checks it."""
        available = len(self.allocator.free_pages) + len(self.allocator.release_pages)
        assert available + self.tree.evictable_size() + used == self.checker.max_total_num_tokens


@pytest.fixture
def prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("base_prefix_cache")
    module.EvictParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.base_prefix_cache", module)


@pytest.fixture
def cache(prefix_cache: None) -> Iterator[Cache]:
    made = Cache()
    yield made
    made.memory.close()


def test_memory_that_is_free_goes_at_once_and_comes_back(cache: Cache) -> None:
    whole = cache.in_memory()
    cache.room.take(1024 * ROW * LAYERS)
    assert cache.room.owed == 0
    assert cache.in_memory() <= whole - 1000 * ROW * LAYERS
    assert int(cache.allocator.free_pages.max()) == TOKENS - 1024
    assert cache.figures["room_bytes"] == 1024 * ROW * LAYERS
    cache.check()
    assert all(bool((layer[: TOKENS - 1024 + 1] == 7).all()) for layer in cache.pool.layers), "the rest is as it was"
    cache.room.take(512 * ROW * LAYERS)
    cache.check()
    assert int(cache.allocator.free_pages.max()) == TOKENS - 512
    cache.room.take(0)
    cache.check()
    assert sorted(cache.allocator.free_pages.tolist()) == list(range(1, TOKENS + 1))
    for layer in cache.pool.layers:
        layer.fill_(1)  # it can be written to again
    assert cache.figures["room_bytes"] == 0


def test_what_requests_have_goes_when_they_end(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_room, "_LOOKS_EVERY", 1)
    whole = cache.in_memory()
    first = cache.allocator.alloc(3500)
    kept, last = first[:3400], first[3400:]
    cache.room.take(1024 * ROW * LAYERS)
    assert cache.room.owed == 3500 - (TOKENS - 1024)
    assert cache.in_memory() == whole
    cache.check(used=3500)
    assert len(cache.allocator.free_pages) == 0, "nothing is left for another request"
    cache.allocator.free(last)
    cache.room.look()
    assert cache.room.owed == 3400 - (TOKENS - 1024)
    cache.allocator.free(kept)
    cache.room.look()
    assert cache.room.owed == 0
    assert cache.in_memory() < whole
    cache.check()


def test_what_is_only_cached_goes_at_once(cache: Cache) -> None:
    cache.tree.cached = cache.allocator.alloc(TOKENS)
    cache.room.take(1024 * ROW * LAYERS)
    assert cache.room.owed == 0
    assert cache.tree.evictable_size() == 0
    cache.check()


def test_it_comes_back_before_it_was_all_given(cache: Cache) -> None:
    used = cache.allocator.alloc(3500)
    cache.room.take(1024 * ROW * LAYERS)
    cache.room.take(0)
    assert cache.room.owed == 0
    cache.check(used=3500)
    cache.allocator.free(used)
    cache.allocator.merge_and_sort_free()
    assert cache.allocator.free_pages.tolist() == list(range(1, TOKENS + 1))


def test_more_than_half_of_the_cache_is_refused(cache: Cache) -> None:
    with pytest.raises(EepError, match="at most half"):
        cache.room.take((TOKENS // 2 + 1) * ROW * LAYERS)
    cache.check()
    assert cache.room.owed == 0


def test_a_cache_of_another_kind_gives_nothing(cache: Cache) -> None:
    cache.pool.cache = None
    with pytest.raises(EepError, match="of a kind"):
        CacheRoom(cache.scheduler, cache.pool)


def test_a_rank_that_serves_experts_only_gives_up_all_of_it(cache: Cache) -> None:
    told: list[RoomRecord] = []
    cache.room = CacheRoom(cache.scheduler, cache.pool, told.append)
    cache.room.take(1024 * ROW * LAYERS)
    cache.room.leave(True)
    assert len(cache.allocator.free_pages) == 0
    assert cache.in_memory() <= 64 << 10
    cache.check()
    assert told[-1] == RoomRecord(TOKENS * ROW * LAYERS, TOKENS)
    cache.room.take(512 * ROW * LAYERS)  # a rank comes back meanwhile
    assert cache.room.owed == 0
    cache.room.leave(False)
    cache.check()
    assert int(cache.allocator.free_pages.max()) == TOKENS - 512, "slots have the rest"
    assert told[-1] == RoomRecord(512 * ROW * LAYERS, 512)


def test_a_flush_brings_nothing_back_that_was_given(cache: Cache) -> None:
    cache.room.take(1024 * ROW * LAYERS)
    cache.allocator.free_pages = torch.arange(1, TOKENS + 1)  # as SGLang does
    cache.room.flushed()
    cache.check()
    assert int(cache.allocator.free_pages.max()) == TOKENS - 1024
    cache.room.take(0)
    cache.check()


def test_a_cache_in_parts_gives_up_as_much_as_is_asked_for(prefix_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the manner of a GPU: whole parts only."""
    HostDriver(units=10_000).install(monkeypatch)
    cache = Cache(in_parts=True)
    memory = cache.memory
    assert isinstance(memory, PartedMemory)

    def given() -> int:
        return sum(part.size for part, each in zip(memory.parts, memory.descriptors, strict=True) if each == NONE)

    cache.room.take(300 * ROW * LAYERS)
    first = given()
    assert first >= 300 * ROW * LAYERS
    cache.check()
    kept = int(cache.allocator.free_pages.max())
    assert kept < TOKENS - 300, "parts are larger than that"
    assert all(bool((layer[: kept + 1] == 7).all()) for layer in cache.pool.layers)
    cache.room.take(1000 * ROW * LAYERS)
    assert given() > first
    cache.check()
    with pytest.raises(EepError, match="at most half"):
        cache.room.take((TOKENS // 2 + 1) * ROW * LAYERS)
    cache.room.take(0)
    assert given() == 0
    assert int(cache.allocator.free_pages.max()) == TOKENS
    cache.check()
    for layer in cache.pool.layers:
        layer.fill_(8)
    memory.close()
