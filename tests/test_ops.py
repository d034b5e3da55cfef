"""``eep.dispatch`` and ``eep.combine`` as operators."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import eep
from eep.control_page import SharedControlPage
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


def test_operators_are_well_formed(buffer: eep.Buffer) -> None:
    batch = moe.make_batch(CONFIG, 0, 3, (0,), tokens=3)
    sent = eep.received.Sent(batch.topk_idx, batch.topk_weights, "bf16", 0)
    written = eep.ops._tensors_of(buffer.tokens_of(sent))
    arguments = (buffer.id, 0, "bf16", batch.x, batch.topk_idx, batch.topk_weights, written)
    torch.library.opcheck(torch.ops.eep.dispatch, arguments, test_utils=["test_schema", "test_faketensor"][1:])
    schema = torch.ops.eep.dispatch.default._schema
    assert schema.arguments[-1].alias_info.is_write
    assert torch.ops.eep.combine.default._schema.arguments[-1].alias_info.is_write


def test_operators_compile(rendezvous: eep.Rendezvous) -> None:
    with CONFIG.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        batch = moe.make_batch(CONFIG, 0, 3, (0,), tokens=3)
        sent = eep.received.Sent(batch.topk_idx, batch.topk_weights, "bf16", 0)
        tokens = buffer.tokens_of(sent)
        written, rows = eep.ops._tensors_of(tokens), buffer.combine_input()

        def layer(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            x = x * 2
            torch.ops.eep.dispatch(buffer.id, 0, "bf16", x, batch.topk_idx, batch.topk_weights, written)
            rows.copy_(written[0])
            torch.ops.eep.combine(buffer.id, 0, "bf16", rows, batch.topk_idx, batch.topk_weights, written, out)
            return out + 1

        out = torch.empty_like(batch.x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(batch.x, out.clone()), layer(batch.x, out.clone()))


def test_an_unknown_buffer_is_refused(buffer: eep.Buffer) -> None:
    batch = moe.make_batch(CONFIG, 0, 3, (0,), tokens=3)
    with pytest.raises(eep.EepError, match="no open buffer with id 12345"):
        torch.ops.eep.dispatch(12345, 0, "bf16", batch.x, batch.topk_idx, None, [])


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
