"""Dispatch and combine against a plain torch reference, bit for bit."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import eep
from eep.data_plane.tokens import ExpertTokens, RankTokens, Sent
from tests import moe
from tests.ranks import Ranks

WIRES = ("f32", "bf16", "fp8", "fp8_pow2", "fp8_ue8m0")


def on_threads(count: int, body: Callable[[int], Any]) -> list[Any]:
    """Runs ``body(rank)`` for each rank in a thread of its own: fast enough for many small instances."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


@st.composite
def configs(draw: st.DrawFn) -> moe.Config:
    layout = draw(st.sampled_from(("rank", "expert")))
    wire = draw(st.sampled_from(WIRES))
    groups = 512 if wire == "fp8_ue8m0" and layout == "expert" else 128
    combine = None if wire == "f32" else draw(st.sampled_from((None, "fp8")))
    in_groups = wire.startswith("fp8") or combine == "fp8"
    hidden = groups * draw(st.integers(1, 3)) if in_groups else draw(st.integers(1, 300))
    ranks = draw(st.integers(1, 5))
    return moe.Config(
        ranks=ranks,
        max_ranks=ranks + draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, 12)),
        hidden=hidden,
        topk=draw(st.integers(1, 16)),
        local_experts=draw(st.integers(1, 6)),
        layout=layout,
        wire=wire,
        combine=combine,
    )


@given(config=configs(), seed=st.integers(0, 2**16), tokens=st.lists(st.integers(0, 12), min_size=5, max_size=5))
# No shrinking: an example that fails makes its ranks wait for each other, and the drawn shapes are small already.
@settings(
    max_examples=120,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_matches_the_reference(config: moe.Config, seed: int, tokens: list[int]) -> None:
    active = tuple(range(config.ranks))
    with eep.Rendezvous.temporary() as rendezvous:

        def body(rank: int) -> torch.Tensor:
            with config.buffer(rank, rendezvous, timeout_ms=10_000) as buffer:
                buffer.connect_ranks(active)
                for round_number in range(2):
                    count = min(tokens[rank], config.max_tokens) if round_number == 0 else None
                    output = moe.step(buffer, config, seed + round_number, active, count)
                    batch = moe.make_batch(config, rank, seed + round_number, active, count)
                    assert buffer.status().ok, buffer.status()
                    assert torch.equal(output, moe.reference(config, batch))
                buffer.barrier()
                return output

        on_threads(config.ranks, body)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_outputs_that_travel_as_fp8_are_nearly_those_that_were_given(
    rendezvous: eep.Rendezvous, tmp_path: pathlib.Path, layout: str
) -> None:
    """The error that the docs state."""
    exact = moe.Config(ranks=2, max_ranks=2, max_tokens=64, hidden=1024, topk=4, local_experts=8, layout=layout)
    encoded = dataclasses.replace(exact, combine="fp8")
    sums = {}
    for config in (exact, encoded):
        with Ranks(eep.Rendezvous(tmp_path / str(config.combine)), config) as group:
            group.start(range(2))
            group.connect(range(2))
            answers = group.all(range(2), "step", 1, (0, 1))
            sums[config] = torch.cat([answers[rank][0][0] for rank in range(2)]).float()
    error = (sums[encoded] - sums[exact]).square().mean() / sums[exact].square().mean()
    assert 0.01 < error.sqrt() < 0.03


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_real_processes(rendezvous: eep.Rendezvous, ranks: int, layout: str) -> None:
    config = moe.Config(ranks=ranks, max_ranks=ranks, local_experts=2, hidden=64, layout=layout)
    with Ranks(rendezvous, config) as group:
        group.start(range(ranks))
        group.connect(range(ranks))
        group.check_steps(range(ranks), seed=7, count=5)


def test_same_bits_on_every_run(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=4, max_tokens=32, hidden=384, topk=8)
    with Ranks(rendezvous, config) as group:
        group.start(range(4))
        group.connect(range(4))
        first = group.all(range(4), "step", 3, (0, 1, 2, 3))
        for _ in range(5):
            again = group.all(range(4), "step", 3, (0, 1, 2, 3))
            assert all(torch.equal(first[rank][0][0], again[rank][0][0]) for rank in range(4))


@pytest.mark.parametrize("wire", ["fp8", "fp8_pow2", "fp8_ue8m0"])
def test_fp8_rows_are_those_of_the_definition(rendezvous: eep.Rendezvous, wire: str) -> None:
    """Rows with all kinds of values: zeros, tiny, huge, negative, powers of two."""
    config = moe.Config(ranks=1, max_ranks=1, max_tokens=64, hidden=512, topk=1, local_experts=1, wire=wire)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=random) * torch.exp2(torch.randint(-30, 30, (64, 1), generator=random).float())
    x[0], x[1, :128], x[2] = 0, 448, torch.exp2(torch.arange(512) % 16 - 8.0)
    x = x.to(torch.bfloat16)
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        tokens = buffer.dispatch(x, torch.zeros(64, 1, dtype=torch.int64))
        values, scales = moe.quantize(x, wire)
        assert isinstance(tokens, RankTokens)
        assert tokens.scales is not None
        assert torch.equal(tokens.x[:64].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(tokens.scales[:64], scales)


def test_on_a_cpu_it_does_not_matter_who_shares_a_gpu(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=1, max_ranks=1, shares_gpu=True)
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([])
        moe.step(buffer, config, 0, (0,))
        assert buffer.status().ok


def test_rows_beyond_the_valid_ones_are_marked(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=1, max_ranks=3, topk=2)
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        for count in (5, 2, 0):
            idx = torch.tensor([[0, 1]] * count, dtype=torch.int64).view(count, 2)
            tokens = buffer.dispatch(torch.ones(count, 256, dtype=torch.bfloat16), idx)
            assert isinstance(tokens, RankTokens)
            assert tokens.rank_counts.tolist() == [count, 0, 0]
            assert tokens.rows().tolist() == list(range(count))
            assert (tokens.topk_idx[count:] == -1).all()
            buffer.combine(buffer.combine_input(), tokens)


def test_expert_layout_packs_valid_rows_first(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=2, max_ranks=3, topk=2, local_experts=2, layout="expert", max_tokens=4)

    def body(rank: int) -> None:
        with config.buffer(rank, rendezvous, timeout_ms=60_000) as buffer:
            buffer.connect_ranks(range(2))
            # rank 0: token t -> experts 0 and 2; rank 1: token t -> experts 0 and 3
            idx = torch.tensor([[0, 2 + rank]] * (3 - rank), dtype=torch.int64)
            x = torch.full((3 - rank, 256), float(rank + 1), dtype=torch.bfloat16)
            x[:, 0] = torch.arange(3 - rank)
            tokens = buffer.dispatch(x, idx)
            assert isinstance(tokens, ExpertTokens)
            if rank == 0:
                assert tokens.expert_counts.tolist() == [5, 0]
                assert tokens.src_info[0, :5].tolist() == [0, 1, 2, 0, 1]
                assert tokens.layout_range[0].tolist() == [0 << 32 | 3, 3 << 32 | 2, 5 << 32]
                assert tokens.x[0, :5, 1].tolist() == [1, 1, 1, 2, 2]
                assert tokens.x[0, :5, 0].tolist() == [0, 1, 2, 0, 1]
            else:
                assert tokens.expert_counts.tolist() == [3, 2]
            buffer.combine(moe.run_experts(buffer, tokens), tokens)
            buffer.barrier()

    on_threads(2, body)


def test_halves_with_compute_between_and_two_in_flight(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=3, max_ranks=3)
    active = (0, 1, 2)

    def body(rank: int) -> None:
        with config.buffer(rank, rendezvous, channels=2, timeout_ms=60_000) as buffer:
            buffer.connect_ranks(active)
            for seed in range(4):
                batches = [moe.make_batch(config, rank, 2 * seed + channel, active) for channel in (0, 1)]
                sent = [
                    buffer.dispatch_send(batch.x, batch.topk_idx, batch.topk_weights, channel=channel)
                    for channel, batch in enumerate(batches)
                ]
                outputs = []
                for one in sent:
                    tokens = buffer.dispatch_recv(one)
                    buffer.combine_send(moe.run_experts(buffer, tokens), tokens)
                    outputs.append(buffer.combine_recv(one))
                for batch, output in zip(batches, outputs, strict=True):
                    assert torch.equal(output, moe.reference(config, batch))
            assert buffer.status().ok
            buffer.barrier()

    on_threads(3, body)


def test_tensors_keep_their_addresses(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=1, max_ranks=2)
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        addresses = set()
        for seed in range(3):
            batch = moe.make_batch(config, 0, seed, (0,))
            tokens = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
            addresses.add((tokens.x.data_ptr(), tokens.topk_idx.data_ptr(), buffer.combine_input().data_ptr()))
            buffer.combine(moe.run_experts(buffer, tokens), tokens)
        assert len(addresses) == 1
        sent = Sent(torch.zeros(0, 4, dtype=torch.int64), None, "bf16", 0)
        assert buffer.tokens_of(sent).x.data_ptr() == next(iter(addresses))[0]
