"""``eep.dispatch`` and ``eep.combine`` as operators."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import eep
from eep.data_plane.control_page import SharedControlPage
from tests import moe

CONFIG = moe.Config(ranks=1, max_ranks=2, hidden=128, topk=2, local_experts=2)


@pytest.fixture(params=["rank", "expert"])
def buffer(rendezvous: eep.Rendezvous, request: pytest.FixtureRequest) -> Iterator[eep.Buffer]:
    config = moe.Config(**{**vars(CONFIG), "layout": request.param})
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        yield buffer


def test_operators_give_what_the_methods_give(buffer: eep.Buffer) -> None:
    batch = moe.make_batch(CONFIG, 0, 3, (0,))
    tokens = eep.dispatch(buffer, batch.x, batch.topk_idx, batch.topk_weights)
    output = eep.combine(buffer, moe.run_experts(buffer, tokens), tokens)
    config = moe.Config(**{**vars(CONFIG), "layout": buffer.layout})
    assert torch.equal(output, moe.reference(config, batch))


@pytest.mark.parametrize("wire", ["bf16", "fp8", "fp8_ue8m0"])
def test_operators_compile(rendezvous: eep.Rendezvous, wire: str) -> None:
    config = moe.Config(**{**vars(CONFIG), "wire": wire})
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        batch = moe.make_batch(CONFIG, 0, 3, (0,), tokens=3)

        def layer(x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            for _ in range(2):
                tokens = eep.dispatch(buffer, x, batch.topk_idx, batch.topk_weights)
                rows = tokens.x.float() if tokens.scales is None else tokens.x.float() * tokens.scales[:, :1].float()
                x = eep.combine(buffer, rows.to(torch.bfloat16), tokens)
            return x + 1

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(batch.x), layer(batch.x))
        assert buffer.status().ok


def test_an_unknown_buffer_is_refused(buffer: eep.Buffer) -> None:
    batch = moe.make_batch(CONFIG, 0, 3, (0,), tokens=3)
    with pytest.raises(eep.EepError, match="no open buffer with id 12345"):
        torch.ops.eep.dispatch(12345, 0, batch.x, batch.topk_idx, None)


def test_the_supervisor_reaches_a_rank_through_its_control_page(buffer: eep.Buffer) -> None:
    page = SharedControlPage(os.dup(buffer.control_fd))
    assert page.status(1).ok
    page.suspect(0b10)
    assert buffer.status().suspects == (1,)
    buffer.connect_ranks([])
    assert buffer.status().ok
    page.revoke(2)
    page.revoke(1)
    assert buffer.status().revoked
    assert page.status(2).revoked
    assert not page.status(3).revoked
    page.close()
