"""Without a prefix cache, a request that moves begins with slots of its own, and holds none while it waits."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches.rank.kv import own_prefix, restore
from tests.sglang_patches.rank.lost_rank import ANSWERED, LOST, PROMPT, Rank, lost_rank

COUNT = len(PROMPT) + len(ANSWERED) - 1


class Adder:
    """SGLang's, as far as it is used: it takes a request into a batch if what is missing fits."""

    def __init__(self, ranks: Rank, room: int = 1000, chunk: int | None = None) -> None:
        self.token_to_kv_pool_allocator, self._room, self.rem_chunk_tokens = ranks.allocator, room, chunk
        self.tree_cache = SimpleNamespace(page_size=1, disable=True)
        self.can_run_list: list[Any] = []
        self.missing: list[int] = []

    def add(self, request: Any) -> str:
        def original(adder: Adder, request: Any) -> str:
            adder.missing.append(len(request.full_untruncated_fill_ids) - len(request.prefix_indices))
            if adder.missing[-1] > adder._room:
                return "no token"
            adder.can_run_list.append(request)
            return "continue"

        return own_prefix._add(original, self, request)


class Waiting:
    """The request that has come to the rank."""

    def __init__(self, ranks: Rank) -> None:
        self.ranks, self.request, self.allocator = ranks, ranks.request, ranks.allocator
        tokens = array("q", [*PROMPT, *ANSWERED])
        vars(self.request).update(
            full_untruncated_fill_ids=tokens,
            prefix_indices=torch.empty(0, dtype=torch.int64),
            sampling_params=SimpleNamespace(ignore_eos=False),
            _compute_max_prefix_len=lambda length: length - 1,
        )
        self.free = sorted(self.allocator.free_slots)
        scheduler = SimpleNamespace(tree_cache=SimpleNamespace(disable=True), token_to_kv_pool_allocator=self.allocator)
        assert restore.restore(scheduler, self.request, LOST) == 0, "not yet"
        assert self.holds_nothing()

    def holds_nothing(self) -> bool:
        return len(self.request.prefix_indices) == 0 and sorted(self.allocator.free_slots) == self.free


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    with lost_rank(tmp_path, monkeypatch) as ranks:
        yield Waiting(ranks)


def test_a_request_begins_with_its_context(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    adder = Adder(waiting.ranks)
    with caplog.at_level("INFO"):
        assert adder.add(waiting.request) == "continue"
    assert adder.missing == [1]
    slots = waiting.request.prefix_indices
    assert slots.tolist() == list(range(100, 100 + COUNT))
    for mine, there in zip(waiting.ranks.mine.layers, waiting.ranks.lost.layers, strict=True):
        assert torch.equal(mine[slots], there[waiting.ranks.slots_there[:COUNT]])
    assert f"has {COUNT} of {COUNT + 1} tokens from rank 2" in caplog.text


def test_a_request_that_is_retracted_later_is_computed_as_ever(waiting: Waiting) -> None:
    assert Adder(waiting.ranks).add(waiting.request) == "continue"
    waiting.allocator.free(waiting.request.prefix_indices)  # SGLang does, with its row
    waiting.request.prefix_indices = torch.empty(0, dtype=torch.int64)
    again = Adder(waiting.ranks)
    again.add(waiting.request)
    assert again.missing == [COUNT + 1]
    assert waiting.holds_nothing()


def test_a_request_that_has_to_wait_holds_nothing_meanwhile(waiting: Waiting) -> None:
    assert Adder(waiting.ranks, room=0).add(waiting.request) == "no token"
    assert waiting.holds_nothing()
    assert Adder(waiting.ranks).add(waiting.request) == "continue"
    assert len(waiting.request.prefix_indices) == COUNT


def test_a_context_for_which_there_is_no_room_is_asked_for_again(waiting: Waiting) -> None:
    taken = waiting.allocator.alloc(len(waiting.free) - 5)
    assert taken is not None
    full = Adder(waiting.ranks, room=5)
    assert full.add(waiting.request) == "no token"
    assert len(waiting.allocator.free_slots) == 5
    waiting.allocator.free(taken)
    assert Adder(waiting.ranks).add(waiting.request) == "continue"
    assert len(waiting.request.prefix_indices) == COUNT


def test_a_context_for_which_there_is_never_room_is_computed(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    waiting.allocator.free_slots = waiting.free = [1, 2, 3]
    assert Adder(waiting.ranks).add(waiting.request) == "continue"
    assert waiting.holds_nothing()
    assert "there was no room to copy it" in caplog.text


def test_a_context_that_cannot_be_copied_leaves_no_slots_behind(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    assert waiting.ranks.lost.table is not None
    waiting.ranks.lost.table[4, 9] = -1
    adder = Adder(waiting.ranks)
    assert adder.add(waiting.request) == "continue"
    assert adder.missing == [COUNT + 1]
    assert waiting.holds_nothing()
    assert "names slots that there are not" in caplog.text


def test_of_a_prompt_in_parts_the_computed_ones_come_along(waiting: Waiting) -> None:
    waiting.ranks.count(24)
    adder = Adder(waiting.ranks, chunk=4)
    adder.add(waiting.request)
    assert adder.missing == [COUNT + 1 - 24]


@pytest.mark.parametrize(("chunk", "missing"), [(None, COUNT - 23), (COUNT - 23, COUNT - 23), (4, COUNT + 1)])
def test_a_prompt_in_parts_that_ignores_end_tokens_has_no_prefix(
    waiting: Waiting, chunk: int | None, missing: int
) -> None:
    """SGLang asserts that."""
    waiting.request.sampling_params.ignore_eos = True
    waiting.ranks.count(24)
    adder = Adder(waiting.ranks, chunk=chunk)
    adder.add(waiting.request)
    assert adder.missing == [missing]


def test_what_sglang_must_compute_is_left_to_it(waiting: Waiting) -> None:
    """Such as the log-probabilities of a prompt."""
    waiting.request._compute_max_prefix_len = lambda length: 20
    adder = Adder(waiting.ranks)
    adder.add(waiting.request)
    assert adder.missing == [COUNT + 1 - 20]


def test_later_versions_ask_for_the_slots(waiting: Waiting) -> None:
    request, tree = SimpleNamespace(prefix_len=0), SimpleNamespace(disable=True)
    own_prefix._begin_with(request, torch.tensor([4, 5, 6]))
    assert request.prefix_len == 3
    assert own_prefix._indices(lambda *_: torch.empty(0), tree, request).tolist() == [4, 5, 6]
    other = SimpleNamespace(prefix_len=1)
    assert own_prefix._indices(lambda *_: torch.tensor([9]), tree, other).tolist() == [9]
