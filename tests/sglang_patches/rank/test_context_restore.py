"""A rank takes over the context of a request from the memory of a lost one, or does without."""

from __future__ import annotations

import os
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eep.anchor.anchor import SOCKET
from eep.anchor.memory_holder import MemoryHolder
from eep.requests.kv.kv_journal import KvJournal, fingerprint
from eep.view import View
from sglang_patches.rank import rank_session
from sglang_patches.rank.kv import anchored_pool, restore
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.restore import LostLife
from sglang_patches.replayed_fields import LOST_LIFE

LAYERS, SLOTS, ROWS, CONTEXT = 2, 200, 6, 128
LOST = LostLife(2, 3, "request")
PROMPT, ANSWERED = list(range(40, 80)), [7, 8, 9]


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


class Allocator:
    def __init__(self) -> None:
        self.free_slots = list(range(100, 190))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken)

    def free(self, slots: torch.Tensor) -> None:
        self.free_slots += slots.tolist()


class Rank:
    """Rank 0, which takes over, beside what rank 2 has left behind."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost, self.mine = (self._pool(directory, monkeypatch, *who) for who in ((2, 3), (0, 0)))
        monkeypatch.setattr(anchored_pool, "_pool", self.mine)
        for number, layer in enumerate(self.lost.layers):
            layer.copy_(torch.arange(layer.numel(), dtype=layer.dtype).view(layer.shape) + 10000 * number)
        assert self.lost.table is not None
        assert self.lost.journal is not None
        self.slots_there = [3 * place % SLOTS for place in range(CONTEXT)]
        self.lost.table[4] = torch.tensor(self.slots_there, dtype=torch.int32)
        self.lost.journal.name(4, fingerprint("request"))
        self.count(len(PROMPT) + len(ANSWERED) - 1)
        self.view = View(5, (0, 1, 3), (0, 0, 3, 0))
        member = SimpleNamespace(wait_for_view=lambda **_: None, newest_view=self.view)
        session = SimpleNamespace(joined=SimpleNamespace(view=self.view, member=member))
        monkeypatch.setattr(rank_session, "get_session", lambda: session)
        self.session = session
        self.scheduler = SimpleNamespace(tree_cache=Tree(), token_to_kv_pool_allocator=Allocator())
        self.request = SimpleNamespace(
            rid="request~1", origin_input_ids=array("q", PROMPT), output_ids=array("q", ANSWERED), extra_key=None
        )

    def count(self, tokens: int) -> None:
        """So many tokens are judged, the lost rank has noted."""
        assert self.lost.journal is not None
        self.lost.journal.count(np.array([4]), np.array([tokens]))

    @staticmethod
    def _pool(directory: Path, monkeypatch: pytest.MonkeyPatch, rank: int, life: int) -> AnchoredPool:
        for name, value in (("EEP_CONTROL_DIR", directory), ("EEP_RANK", rank), ("EEP_INCARNATION", life)):
            monkeypatch.setenv(name, str(value))
        pool = AnchoredPool()
        pool.take_table((ROWS, CONTEXT))
        shape = torch.empty(SLOTS, 2, 4)
        pool.take_cache([shape] * LAYERS, [shape] * LAYERS)
        return pool

    def restore(self, lost: LostLife = LOST) -> int:
        return restore.restore(self.scheduler, self.request, lost)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    holder, (told, ends) = MemoryHolder(str(tmp_path / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    made = Rank(tmp_path, monkeypatch)
    yield made
    made.lost.anchor.close()
    made.mine.anchor.close()
    os.write(ends, b"x")
    thread.join(10)


def test_everything_but_the_newest_token_comes_along(rank: Rank) -> None:
    count = len(PROMPT) + len(ANSWERED) - 1
    assert rank.restore() == count
    ((tokens, slots, known),) = rank.scheduler.tree_cache.inserted
    assert (tokens, slots, known) == ([*PROMPT, *ANSWERED][:count], list(range(100, 100 + count)), 0)
    for mine, there in zip(rank.mine.layers, rank.lost.layers, strict=True):
        assert torch.equal(mine[slots], there[rank.slots_there[:count]])


def test_what_is_there_already_is_not_copied(rank: Rank) -> None:
    rank.scheduler.tree_cache.known = [11, 12, 13, 14, 15]
    count = len(PROMPT) + len(ANSWERED) - 1
    assert rank.restore() == count - 5
    ((_, slots, known),) = rank.scheduler.tree_cache.inserted
    assert (slots[:5], known) == ([11, 12, 13, 14, 15], 5)
    assert torch.equal(rank.mine.layers[0][slots[5:]], rank.lost.layers[0][rank.slots_there[5:count]])
    assert len(rank.scheduler.token_to_kv_pool_allocator.free_slots) == 90 - (count - 5)


def test_of_a_prompt_what_is_computed_comes_along(rank: Rank) -> None:
    rank.request.output_ids = array("q")
    rank.count(24)
    assert rank.restore() == 24
    ((tokens, slots, _),) = rank.scheduler.tree_cache.inserted
    assert tokens == PROMPT[:24]
    assert torch.equal(rank.mine.layers[0][slots], rank.lost.layers[0][rank.slots_there[:24]])


def taken_over(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the copy the next life of rank 2 begins."""
    original = restore._copy

    def copy(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        found = rank.mine.anchor.find(2, anchored_pool.JOURNAL)
        assert found is not None
        os.close(found[1])
        KvJournal(restore._attached(rank.mine, 2, anchored_pool.JOURNAL).numpy(), ROWS, 4)

    monkeypatch.setattr(restore, "_copy", copy)


def is_in(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.session.joined.view = rank.session.joined.member.newest_view = View(5, (0, 1, 2, 3), (0, 0, 3, 0))


def is_full(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.scheduler.token_to_kv_pool_allocator.free_slots = [1, 2, 3]


def is_withdrawn(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.lost.journal is not None
    rank.lost.journal.withdraw(4)


def names_no_slot(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.lost.table is not None
    rank.lost.table[4, 9] = SLOTS


def sglang_raises(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("not ported")

    monkeypatch.setattr(rank.scheduler.tree_cache, "match_prefix", fail)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (taken_over, "was taken over meanwhile"),
        (is_in, "rank 2 still has it"),
        (is_full, "has no room for 42 tokens"),
        (is_withdrawn, "has noted nothing of it"),
        (names_no_slot, "names slots that there are not"),
        (sglang_raises, "not ported"),
    ],
)
def test_a_context_that_cannot_be_had_is_computed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: Any, said: str
) -> None:
    what(rank, monkeypatch)
    before = sorted(rank.scheduler.token_to_kv_pool_allocator.free_slots)
    assert rank.restore() == 0
    assert said in caplog.text
    assert rank.scheduler.tree_cache.inserted == []
    assert sorted(rank.scheduler.token_to_kv_pool_allocator.free_slots) == before, "slots were lost"


def test_nothing_is_said_where_there_is_no_prefix_cache(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.scheduler.tree_cache.disable = True
    assert rank.restore() == 0
    assert caplog.text == ""


def test_the_life_travels_with_the_request_once() -> None:
    parameters = SimpleNamespace(custom_params={LOST_LIFE: [2, 3, "request"], "__req__": None})
    request = SimpleNamespace(sampling_params=parameters)
    assert restore.take_lost_life(request) == LOST
    assert parameters.custom_params is None
    assert restore.take_lost_life(request) is None
