"""The DeepEP interface: bad arguments, calls of normal mode, and a buffer that was destroyed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat.deep_ep import Buffer
from tests import moe
from tests.compat.deep_ep_ranks import (
    SMALL,
    Fleet,
    combine_of,
    dispatch,
    mask,
    new_buffer,
    raises,
    reference,
    run_experts,
    step,
)


def play_bad_arguments(group: dist.ProcessGroup) -> None:
    raises(eep.EepError, "comm is not supported", Buffer, group, comm=object())
    raises(ValueError, "max_ranks is 1", Buffer, group, max_ranks=1)
    raises(ValueError, "timeout_ms", Buffer, group, timeout_ms=0)
    raises(ValueError, "EEP_RENDEZVOUS", Buffer, None)
    raises(eep.EepError, "explicitly_destroy", Buffer(group).destroy)

    buffer, config = new_buffer(group), SMALL
    active, experts = tuple(range(config.ranks)), config.ranks * config.local_experts
    batch = moe.make_batch(config, buffer.rank, 1, active, 4)
    x, idx, weights = batch.x, batch.topk_idx, batch.topk_weights

    def refused_dispatches() -> None:
        for kind, words, change in (
            (TypeError, "x must be torch.bfloat16", {"x": x.float()}),
            (ValueError, "x must be of shape", {"x": x[0]}),
            (ValueError, "contiguous", {"x": torch.zeros(4, 1024, dtype=torch.bfloat16)[:, ::2]}),
            (TypeError, "topk_idx must be torch.int64", {"topk_idx": idx.int()}),
            (ValueError, "topk_idx must be of shape", {"topk_idx": idx[:3]}),
            (ValueError, "more than num_max_dispatch", {"num_max_dispatch_tokens_per_rank": 3}),
            (ValueError, "max_tokens must be", {"num_max_dispatch_tokens_per_rank": 70_000}),
            (ValueError, "multiple of the 3 ranks", {"num_experts": experts + 1}),
            (ValueError, "round_scale", {"use_ue8m0": True}),
            (eep.EepError, "choose one", {"async_finish": True, "return_recv_hook": True}),
            (eep.EepError, "not supported", {"dispatch_wait_recv_cost_stats": torch.zeros(4)}),
            (ValueError, "recv_stats must be of shape", {"cumulative_local_expert_recv_stats": idx[0].int()}),
        ):
            arguments: dict[str, Any] = {
                "x": x,
                "topk_idx": idx,
                "num_max_dispatch_tokens_per_rank": config.max_tokens,
                "num_experts": experts,
            }
            raises(kind, words, buffer.low_latency_dispatch, **{**arguments, **change})

    refused_dispatches()  # before there is any memory
    step(buffer, config, 0, active)
    refused_dispatches()
    for kind, words, bad in (
        (ValueError, "expert slots go from", torch.full_like(idx, config.max_ranks * config.local_experts)),
        (ValueError, "expert slots go from", torch.full_like(idx, -2)),
        (ValueError, "top-k", torch.zeros(4, 17, dtype=torch.int64)),
        (ValueError, "top-k", torch.zeros(4, 0, dtype=torch.int64)),
    ):
        raises(kind, words, buffer.low_latency_dispatch, x, bad, config.max_tokens, experts)
    raises(ValueError, "mask_status must be", buffer.low_latency_query_mask_buffer, torch.zeros(3).int())
    raises(ValueError, "outside the capacity", buffer.low_latency_update_mask_buffer, 4, True)
    raises(ValueError, "outside the capacity", buffer.connect_ranks, [-1])
    raises(ValueError, "cannot disconnect itself", buffer.disconnect_ranks, [buffer.rank])
    buffer.connect_ranks([3], activate=False)

    recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False, async_finish=True)
    output = run_experts(buffer, config, recv_x, count)
    for kind, words, change in (
        (TypeError, "x must be torch.bfloat16", {"x": output.float()}),
        (ValueError, "x must be of shape", {"x": output[:1]}),
        (ValueError, "topk_idx must be of shape", {"topk_idx": idx[:3]}),
        (ValueError, "did not send", {"topk_idx": idx + 1}),
        (TypeError, "topk_weights must be torch.float32", {"topk_weights": weights.double()}),
        (ValueError, "topk_weights must be of shape", {"topk_weights": weights[:, :1]}),
        (ValueError, "out must be of shape", {"out": torch.zeros(5, config.hidden, dtype=torch.bfloat16)}),
        (TypeError, "out must be torch.bfloat16", {"out": torch.zeros(4, config.hidden)}),
        (eep.EepError, "no dispatch in flight", {"handle": (handle[0].clone(), *handle[1:])}),
        (eep.EepError, "use_logfmt is not supported", {"use_logfmt": True}),
        (eep.EepError, "not supported", {"combine_wait_recv_cost_stats": torch.zeros(4)}),
        (eep.EepError, "choose one", {"async_finish": True, "return_recv_hook": True}),
    ):
        arguments = {"x": output, "topk_idx": idx, "topk_weights": weights, "handle": handle}
        raises(kind, words, buffer.low_latency_combine, **{**arguments, **change})
    idx_of_some = torch.where(torch.arange(config.topk) == 0, idx, -1)
    combined, _, _ = buffer.low_latency_combine(output, idx_of_some, weights, handle)
    assert torch.equal(combined, reference(config, moe.Batch(x, idx_of_some, weights)))
    step(buffer, config, 2, active)

    # A living rank that was masked stays out: only a new process may come back.
    buffer.barrier()
    dist.barrier()
    if buffer.rank < 2:
        unfinished = dispatch(buffer, config, batch, return_recv_hook=True)
        buffer.low_latency_update_mask_buffer(2, True)
        raises(eep.EepError, "abandoned", unfinished[4])
        raises(eep.EepError, "abandoned", combine_of(buffer, batch, unfinished[2]), output)
        assert mask(buffer) == [0, 0, 1, 1]
        raises(ValueError, "stale", buffer.low_latency_update_mask_buffer, 2, False)
        step(buffer, config, 3, (0, 1))
    dist.barrier()

    buffer.destroy()
    buffer.destroy()
    assert not os.path.exists(buffer.rendezvous) or buffer.rank != 0
    for call in (
        lambda: dispatch(buffer, config, batch),
        lambda: combine_of(buffer, batch, handle)(output),
        lambda: mask(buffer),
        lambda: buffer.connect_ranks([0]),
        buffer.low_latency_clean_mask_buffer,
        buffer.barrier,
    ):
        raises(eep.EepError, "destroyed", call)


def test_bad_arguments_raise_and_change_nothing(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_bad_arguments, SMALL.ranks))


def test_calls_of_normal_mode_say_what_to_do_instead(
    rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EEP_RENDEZVOUS", str(rendezvous.path))
    monkeypatch.setenv("EEP_RANK", "0")
    monkeypatch.setenv("EEP_WORLD_SIZE", "1")
    buffer = Buffer(None)
    x, idx = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    for name, arguments in (
        ("get_dispatch_layout", (idx, 1)),
        ("dispatch", (x,)),
        ("combine", (x, object())),
        ("internode_dispatch", (x,)),
        ("internode_combine", (x, object())),
        ("get_local_buffer_tensor", (torch.bfloat16,)),
    ):
        raises(eep.EepError, f"^{name} .*normal mode.*low_latency_dispatch", getattr(buffer, name), *arguments)
    for name in ("set_num_sms", "get_dispatch_config", "get_combine_config"):
        raises(eep.EepError, "normal mode", getattr(Buffer, name), 24)
