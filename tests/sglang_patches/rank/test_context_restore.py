"""A rank takes over the context of a request from the memory of a lost one into the prefix cache, or does without."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eep import faults
from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.kv_journal import KvJournal, journal_bytes
from eep.view import View
from sglang_patches.rank import next_life
from sglang_patches.rank.kv import anchored_pool, lost_pool, restore
from sglang_patches.replayed_fields import LOST_LIFE
from tests.sglang_patches.rank.lost_rank import (
    ANSWERED,
    CONTEXT,
    LAYERS,
    LOST,
    PROMPT,
    ROWS,
    SLOTS,
    Rank,
    let_go,
    lost_rank,
)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of SGLang's calls, which are plain records; the real server's own tests use the real ones."""
    for module, names in (
        ("base_prefix_cache", ("InsertParams", "EvictParams", "MatchPrefixParams")),
        ("radix_cache", ()),
    ):
        made = ModuleType(f"sglang.srt.mem_cache.{module}")
        for name in names:
            setattr(made, name, SimpleNamespace)
        made.RadixKey = lambda tokens, extra: SimpleNamespace(token_ids=tokens, extra_key=extra)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, made.__name__, made)


class Tree:
    """SGLang's cache of prefixes, as far as it is used."""

    disable, page_size = False, 1

    def __init__(self) -> None:
        self.known: list[int] = []
        self.inserted: list[tuple[list[int], list[int], int]] = []

    def match_prefix(self, asked: Any) -> Any:
        return SimpleNamespace(device_indices=torch.tensor(self.known, dtype=torch.int64))

    def insert(self, made: Any) -> None:
        self.inserted.append((list(made.key.token_ids), made.value.tolist(), made.prev_prefix_len))

    def evict(self, asked: Any) -> None:
        pass


class Caching:
    """The rank that takes over has a prefix cache."""

    def __init__(self, ranks: Rank) -> None:
        self.ranks, self.tree, self.allocator = ranks, Tree(), ranks.allocator

    def restore(self) -> int:
        scheduler = SimpleNamespace(tree_cache=self.tree, token_to_kv_pool_allocator=self.allocator)
        return restore.restore(scheduler, self.ranks.request, LOST)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caching]:
    with lost_rank(tmp_path, monkeypatch) as ranks:
        yield Caching(ranks)


def test_everything_but_the_newest_token_comes_along(rank: Caching) -> None:
    count = len(PROMPT) + len(ANSWERED) - 1
    assert rank.restore() == count
    ((tokens, slots, known),) = rank.tree.inserted
    assert (tokens, slots, known) == ([*PROMPT, *ANSWERED][:count], list(range(100, 100 + count)), 0)
    for mine, there in zip(rank.ranks.mine.layers, rank.ranks.lost.layers, strict=True):
        assert torch.equal(mine[slots], there[rank.ranks.slots_there[:count]])


def test_what_is_there_already_is_not_copied(rank: Caching) -> None:
    rank.tree.known = [11, 12, 13, 14, 15]
    count = len(PROMPT) + len(ANSWERED) - 1
    assert rank.restore() == count - 5
    ((_, slots, known),) = rank.tree.inserted
    assert (slots[:5], known) == ([11, 12, 13, 14, 15], 5)
    assert torch.equal(rank.ranks.mine.layers[0][slots[5:]], rank.ranks.lost.layers[0][rank.ranks.slots_there[5:count]])
    assert len(rank.allocator.free_slots) == 90 - (count - 5)


def test_of_a_prompt_what_is_computed_comes_along(rank: Caching) -> None:
    rank.ranks.request.output_ids = array("q")
    rank.ranks.count(24)
    assert rank.restore() == 24
    ((tokens, slots, _),) = rank.tree.inserted
    assert tokens == PROMPT[:24]
    assert torch.equal(rank.ranks.mine.layers[0][slots], rank.ranks.lost.layers[0][rank.ranks.slots_there[:24]])


def taken_over(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the copy the next life of rank 2 begins."""

    def begin(point: str) -> None:
        if point == "kv.restore.mid":
            mine = rank.ranks.mine
            assert mine.table is not None
            size = journal_bytes(len(mine.table))
            noted, _ = lost_pool.mapped(mine, 2, anchored_pool.JOURNAL, size, SharedMemory)
            KvJournal(noted.numpy(), ROWS, 4)

    monkeypatch.setattr(faults, "at", begin)


def is_in(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.ranks.session.joined.view = rank.ranks.session.joined.member.newest_view = View(5, (0, 1, 2, 3), (0, 0, 3, 0))


def is_full(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.allocator.free_slots = [1, 2, 3]


def is_withdrawn(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.ranks.lost.journal is not None
    rank.ranks.lost.journal.withdraw(4)


def names_no_slot(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.ranks.lost.table is not None
    rank.ranks.lost.table[4, 9] = SLOTS


def is_of_another_kind(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a model with a sliding window, which has two pools."""
    rank.allocator.cache = SimpleNamespace(swa_kv_pool=None, full_kv_pool=None)


def sglang_raises(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("not ported")

    monkeypatch.setattr(rank.tree, "match_prefix", fail)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (taken_over, "was taken over meanwhile"),
        (is_in, "rank 2 still has it"),
        (is_full, "has no room for 42 tokens"),
        (is_withdrawn, "has noted nothing of it"),
        (names_no_slot, "names slots that there are not"),
        (sglang_raises, "not ported"),
        (is_of_another_kind, "a cache of this kind is not kept"),
    ],
)
def test_a_context_that_cannot_be_had_is_computed(
    rank: Caching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: Any, said: str
) -> None:
    what(rank, monkeypatch)
    before = sorted(rank.allocator.free_slots)
    assert rank.restore() == 0
    assert said in caplog.text
    assert rank.tree.inserted == []
    assert sorted(rank.allocator.free_slots) == before, "slots were lost"


@pytest.mark.parametrize("taken", [0, 20, 42])
def test_slots_that_the_tree_did_not_take_are_given_back(
    rank: Caching, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Whatever it has, it frees itself one day. To free it here as well would give it to two requests."""

    def insert(made: Any) -> None:
        rank.tree.known = made.value[:taken].tolist()
        raise RuntimeError("half way")

    rank.tree.known = [11, 12, 13]
    monkeypatch.setattr(rank.tree, "insert", insert)
    before = set(rank.allocator.free_slots)
    assert rank.restore() == 0
    assert len(rank.allocator.free_slots) == len(set(rank.allocator.free_slots))
    assert set(rank.allocator.free_slots) == before - set(rank.tree.known)


def test_slots_that_the_tree_may_have_taken_are_left_to_it(rank: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(made: Any) -> None:
        monkeypatch.setattr(rank.tree, "match_prefix", insert)
        raise RuntimeError("half way")

    monkeypatch.setattr(rank.tree, "insert", insert)
    before = len(rank.allocator.free_slots)
    assert rank.restore() == 0
    assert len(rank.allocator.free_slots) == before - (len(PROMPT) + len(ANSWERED) - 1)


def test_the_life_travels_with_the_request_once() -> None:
    parameters = SimpleNamespace(custom_params={LOST_LIFE: [2, 3, "request"], "__req__": None})
    request = SimpleNamespace(sampling_params=parameters)
    assert restore.take_lost_life(request) == LOST
    assert parameters.custom_params is None
    assert restore.take_lost_life(request) is None


@pytest.mark.parametrize("room", [True, False])
def test_the_next_life_of_the_lost_rank_waits_until_the_context_is_fetched_or_given_up(
    rank: Caching, room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = rank.ranks.lost
    monkeypatch.setenv("EEP_RANK", "2")
    monkeypatch.setenv("EEP_INCARNATION", "4")
    monkeypatch.setattr(next_life, "_conditions", [])
    later = anchored_pool.AnchoredPool()
    later.take_table((ROWS, CONTEXT))
    later.take_cache([torch.empty(SLOTS, 2, 4)] * LAYERS * 2)
    later.layers[0].fill_(-1)  # nothing of the lost rank
    next_life.look_whether_free()
    assert not later._is_free()
    if not room:
        rank.allocator.free_slots = []
    assert (rank.restore() > 0) == room
    assert later._is_free()
    assert torch.equal(later.layers[0], torch.full_like(later.layers[0], -1))
    next_life.look_whether_free()
    assert torch.equal(later.layers[0], lost.layers[0]), "now it has the memory of the last life"
    assert later.journal is not None
    let_go(later)
