"""Sampling by seed and position: the hash is right, draws are fair, and only the row itself decides them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_patches.sampling import seeded_choice
from sglang_patches.sampling.seeds import Seeds


def murmur3(data: bytes) -> int:
    """The published algorithm, for whole blocks of four bytes."""
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= block
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_hash_is_murmur3() -> None:
    assert murmur3(b"test") == 0xBA6BD213, "a published value"
    seeds, positions, columns = [0, 7, -1, 2**62 + 12345], [0, 1, 4095, 2**31 - 1], [0, 1, 511, 151935]
    hashed = seeded_choice.murmur_hash(
        torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32), torch.tensor(columns)
    )
    wanted = [
        [murmur3(struct.pack("<QII", seed % 2**64, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == wanted


def drawn(weights: Any, seeds: list[int], positions: list[int], tokens: Any = None) -> list[int]:
    found: list[int] = (
        seeded_choice.draw_tokens(weights, tokens, torch.tensor(seeds), torch.tensor(positions)).view(-1).tolist()
    )
    return found


def test_draws_are_fair() -> None:
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0])
    count = 20000
    found = drawn(weights.expand(count, 4), [11] * count, list(range(count)))
    shares = [found.count(token) / count for token in range(4)]
    assert shares == pytest.approx(weights.tolist(), abs=0.015)
    assert shares[3] == 0
    by_seed = drawn(weights.expand(count, 4), list(range(count)), [5] * count)
    assert [by_seed.count(token) / count for token in range(4)] == pytest.approx(weights.tolist(), abs=0.015)
    assert by_seed != found


def test_a_row_does_not_depend_on_the_others() -> None:
    probs = torch.rand(6, 64, generator=torch.Generator().manual_seed(1)).softmax(dim=-1)
    together = drawn(probs, [3, 1, 4, 1, 5, 9], [10, 11, 12, 13, 14, 15])
    assert together[4] == drawn(probs[4:5], [5], [14])[0]


def test_a_filter_of_another_request_changes_nothing() -> None:
    """SGLang filters all rows of a batch when one request asks for it."""
    probs = torch.rand(200, 64, generator=torch.Generator().manual_seed(2)).mul(6).softmax(dim=-1)
    seeds, positions = [8] * 200, list(range(200))
    everything = torch.full((200,), 1 << 30), torch.ones(200)
    weights, tokens = seeded_choice.keep_likely(probs, *everything, min_ps=torch.zeros(200))
    columns = drawn(weights, seeds, positions, tokens)
    assert [tokens[row, column].item() for row, column in enumerate(columns)] == drawn(probs, seeds, positions)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (2, 1.0, None, {0, 3}),
        (9, 0.6, None, {0, 3}),
        (9, 1.0, 0.5, {0, 3}),
        (9, 1.0, 0.2, {0, 1, 3}),
        (1, 1.0, None, {3}),
    ],
)
def test_filters(top_k: int, top_p: float, min_p: float | None, kept: set[int]) -> None:
    probs = torch.tensor([[0.3, 0.15, 0.05, 0.5]])
    weights, tokens = seeded_choice.keep_likely(
        probs, torch.tensor([top_k]), torch.tensor([top_p]), None if min_p is None else torch.tensor([min_p])
    )
    assert {int(token) for token, weight in zip(tokens[0], weights[0], strict=True) if weight > 0} == kept
    column = drawn(weights, [1], [1], tokens)[0]
    assert int(tokens[0, column]) in kept


def test_of_equals_the_greedy_choice_is_the_first() -> None:
    """As it is where no request of the batch samples."""
    probs = torch.full((1, 300), 1 / 300)
    weights, tokens = seeded_choice.keep_likely(probs, torch.tensor([1]), torch.ones(1), None)
    assert int(tokens[0, drawn(weights, [1], [1], tokens)[0]]) == int(probs.argmax())


@dataclass
class Parameters:
    sampling_seed: int | None = None
    n: int = 1


def test_a_request_without_a_seed_gets_one_and_another_keeps_its_own() -> None:
    new = iter((101, 102))
    seeds = Seeds(lambda: next(new))
    assert [seeds.seed_for(Parameters()), seeds.seed_for(Parameters())] == [101, 102]
    assert [seeds.seed_for(Parameters(7)), seeds.seed_for(Parameters(7)), seeds.seed_for(Parameters(-(2**63)))] == [
        7,
        7,
        -(2**63),
    ]


def test_the_samples_of_a_request_differ_and_are_the_same_when_it_is_asked_again() -> None:
    seeds = Seeds()
    one, other, again = (Parameters(7, n=3) for _ in range(3))
    first = [seeds.seed_for(each) for each in (one, other, one, other, other, one)]
    assert (first[0], first[2], first[5]) == (first[1], first[3], first[4])
    assert first[0] == 7
    assert len(set(first)) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in first)
    assert [seeds.seed_for(again) for _ in range(3)] == [first[0], first[2], first[5]]
    assert not seeds._families


def test_samples_that_never_come_are_forgotten() -> None:
    seeds = Seeds()
    for _ in range(5000):
        seeds.seed_for(Parameters(7, n=2))
    assert len(seeds._families) <= 1024
