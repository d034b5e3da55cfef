"""Programs for DeepEP set torch's default type to bfloat16 and its default device to a GPU. No result depends on either."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import eep
from eep.compat import deep_ep, nixl_ep
from eep.data_plane.tokens import RankTokens
from tests import moe
from tests.compat import test_deep_ep_elastic as elastic
from tests.compat import test_deep_ep_normal as normal
from tests.compat.deep_ep_ranks import SMALL, WIRES, Fleet, new_buffer, step, with_wire


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """On the default device no tensor has values: one that is made there by mistake is found out."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


class UnderOtherDefaults:
    """``buffer``, whose methods run under other defaults. What a test computes itself does not."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._buffer, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            with other_defaults():
                return found(*args, **options)

        return call


def play_low_latency(group: dist.ProcessGroup) -> None:
    with other_defaults():
        made = new_buffer(group, enable_shrink=True)
    buffer: Any = UnderOtherDefaults(made)
    for seed, wire in enumerate(WIRES):
        step(buffer, with_wire(SMALL, wire), seed, tuple(range(SMALL.ranks)))
    buffer.destroy()


def test_low_latency_mode(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_low_latency, SMALL.ranks))


def play_normal_mode(group: dist.ProcessGroup) -> None:
    with other_defaults():
        made = new_buffer(group, max_ranks=SMALL.ranks)
    buffer: Any = UnderOtherDefaults(made)
    batches = normal.batches_of(1, {0: 40, 1: 0, 2: 9})
    recv_x, weights, handle = normal.check_dispatch(buffer, batches, use_fp8=False, alignment=1)
    normal.check_combine(buffer, batches[made.rank], handle, weights, recv_x * (made.rank + 1))
    buffer.destroy()


def test_normal_mode(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_normal_mode, SMALL.ranks))


def play_without_weights(group: dist.ProcessGroup) -> None:
    with other_defaults():
        made = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=elastic.MOST, explicitly_destroy=True)
    buffer: Any = UnderOtherDefaults(made)
    batches = elastic.batches_of(1)
    # The last rank receives nothing: no token names its experts.
    batches = [
        dataclasses.replace(batch, topk_idx=torch.where(batch.topk_idx // elastic.LOCAL < 2, batch.topk_idx, -1))
        for batch in batches
    ]
    batch = batches[made.rank_idx]
    _, idx, weights, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, num_experts=elastic.EXPERTS)
    assert weights is None or (weights.dtype, weights.any().item()) == (torch.float32, False)
    assert (len(idx) == 0) == (made.rank_idx == 2)
    assert len(idx) == handle.num_recv_tokens
    x, _, _, expanded, _ = buffer.dispatch(
        batch.x, batch.topk_idx, batch.topk_weights, num_experts=elastic.EXPERTS, do_expand=True
    )
    combined, _, _ = buffer.combine(torch.zeros_like(x), expanded)
    assert not combined.any()
    buffer.destroy()


def test_elastic_buffer(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_without_weights, elastic.RANKS))


def test_weights_that_travel_with_tokens(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=1, max_ranks=1)
    batch = moe.make_batch(config, 0, 0, (0,))
    with other_defaults():
        made = config.buffer(0, rendezvous)
    with made as buffer:
        buffer.connect_ranks([])
        tokens = UnderOtherDefaults(buffer).dispatch(batch.x, batch.topk_idx, batch.topk_weights)
        assert isinstance(tokens, RankTokens)
        sent = torch.where(batch.topk_idx >= 0, batch.topk_weights, 0)
        assert torch.equal(torch.where(tokens.topk_idx >= 0, tokens.topk_weights, 0)[: len(sent)], sent)


def play_nixl(group: dist.ProcessGroup) -> None:
    with other_defaults():
        buffer = nixl_ep.Buffer(rank=group.rank(), group=group, explicitly_destroy=True)
        num_bytes = buffer.get_rdma_size_hint(8, 512, group.size(), group.size())
        buffer.update_memory_buffers(group.size(), 1, num_bytes)
        buffer.connect_ranks(range(group.size()))
    status = torch.full((group.size(),), 9, dtype=torch.int32)
    with other_defaults():
        buffer.query_mask_buffer(status)
    assert status.tolist() == [0] * group.size()
    buffer.destroy()


def test_nixl(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_nixl, 2))
