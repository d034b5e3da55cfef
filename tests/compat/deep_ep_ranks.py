"""Rank processes behind DeepEP's interface, and what each of their steps must give.

Each process runs one function, its play, and reports how it went.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eep.compat.deep_ep import Buffer
from tests import moe
from tests.forks import CONTEXT

Play = Callable[..., None]
"""A function of a test file, whose first argument is the process group."""
PATIENCE_S = 120.0
WIRES = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "fp8_pow2": {"round_scale": True},
    "fp8_ue8m0": {"round_scale": True, "use_ue8m0": True},
}
SMALL = moe.Config(ranks=3, max_ranks=4, max_tokens=6, hidden=512, topk=3, local_experts=2, layout="expert")


# ---- processes ----


def _run(
    connection: Connection,
    play: Play,
    rank: int,
    size: int,
    store: str,
    environment: dict[str, str],
    args: Any,
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        group = dist.group.WORLD
        assert group is not None
        play(group, *args)
        connection.send("")
    except BaseException:
        connection.send(traceback.format_exc())


class Fleet:
    """Processes that each play a part. In the end all are killed, whatever happened."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._started: list[tuple[Any, Connection]] = []

    def start(self, play: Play, size: int, *args: Any, **environment: str) -> list[int]:
        """A process group of ``size`` ranks; returns what to give to :meth:`finish`."""
        store = str(self._directory / f"store{len(self._started)}")
        first = len(self._started)
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_run, args=(theirs, play, rank, size, store, environment, args))
            process.start()
            theirs.close()
            self._started.append((process, ours))
        return list(range(first, first + size))

    def finish(self, numbers: Sequence[int], dead: Sequence[int] = ()) -> None:
        """Waits until all have ended: well, except for those that must be ``dead`` by SIGKILL."""
        for number in numbers:
            process, connection = self._started[number]
            if number in dead:
                process.join(PATIENCE_S)
                assert process.exitcode == -signal.SIGKILL
                continue
            assert connection.poll(PATIENCE_S), f"process {number} did not end within {PATIENCE_S:.0f} s"
            said = connection.recv()
            assert not said, f"process {number}:\n{said}"
            process.join(PATIENCE_S)

    def close(self) -> None:
        for process, connection in self._started:
            process.kill()
            process.join(PATIENCE_S)
            connection.close()


# ---- a step, and what it must give ----


def with_wire(config: moe.Config, wire: str) -> moe.Config:
    return dataclasses.replace(config, wire=wire)


def dispatch(buffer: Buffer, config: moe.Config, batch: moe.Batch, **options: Any) -> Any:
    return buffer.low_latency_dispatch(
        batch.x, batch.topk_idx, config.max_tokens, config.ranks * config.local_experts, **options
    )


def run_experts(buffer: Buffer, config: moe.Config, recv_x: Any, count: torch.Tensor) -> torch.Tensor:
    x, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    output = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
    for local, rows in enumerate(count.tolist()):
        scale = None if scales is None else moe.unpack_scales(scales[local, :rows])
        ids = torch.full((rows,), buffer.rank * config.local_experts + local)
        output[local, :rows] = moe.expert(moe.dequantize(x[local, :rows], scale), ids).to(torch.bfloat16)
    return output


def check_received(
    buffer: Buffer,
    config: moe.Config,
    sources: dict[int, moe.Batch],
    recv_x: Any,
    count: torch.Tensor,
    handle: Any,
) -> None:
    """Compares every row with the token that belongs there, and every shape and stride with the contract."""
    experts, rows, hidden = config.local_experts, config.max_ranks * config.max_tokens, config.hidden
    src_info, layout_range, *sizes = handle
    assert sizes == [config.max_tokens, hidden, config.ranks * experts]
    assert (src_info.dtype, src_info.shape) == (torch.int32, (experts, rows))
    assert (layout_range.dtype, layout_range.shape) == (torch.int64, (experts, config.max_ranks))
    assert (count.dtype, count.shape) == (torch.int32, (experts,))
    x, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    assert (scales is not None) == config.wire.startswith("fp8")
    assert x.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
    assert x.shape == (experts, rows, hidden)
    assert x.is_contiguous()
    if scales is not None:
        packs = config.wire == "fp8_ue8m0"
        words = hidden // (512 if packs else 128)
        assert scales.dtype == (torch.int32 if packs else torch.float32)
        assert scales.shape == (experts, rows, words)
        assert scales.stride() == (rows * words, 1, rows)
    for local in range(experts):
        begin = 0
        for source in range(config.max_ranks):
            batch = sources.get(source)
            wanted = torch.zeros(0, dtype=torch.int64)
            if batch is not None:
                wanted = (batch.topk_idx == buffer.rank * experts + local).any(1).nonzero().squeeze(1)
            end = begin + len(wanted)
            assert layout_range[local, source] == begin << 32 | len(wanted)
            if batch is not None:
                assert src_info[local, begin:end].tolist() == wanted.tolist()
                sent, sent_scales = batch.x[wanted], None
                if scales is not None:
                    sent, sent_scales = moe.quantize(batch.x[wanted], config.wire)
                    assert torch.equal(moe.unpack_scales(scales[local, begin:end]), sent_scales)
                assert torch.equal(x[local, begin:end].view(torch.uint8), sent.view(torch.uint8))
            begin = end
        assert count[local] == begin


def step(
    buffer: Buffer,
    config: moe.Config,
    seed: int,
    active: tuple[int, ...],
    tokens: dict[int, int] | None = None,
) -> None:
    """A dispatch and its combine, everything compared with the reference."""
    tokens = tokens or {}
    batches = {rank: moe.make_batch(config, rank, seed, active, tokens.get(rank)) for rank in active}
    batch = batches[buffer.rank]
    stats = torch.full((config.local_experts,), 7, dtype=torch.int32)
    recv_x, count, handle, event, hook = dispatch(
        buffer, config, batch, cumulative_local_expert_recv_stats=stats, **WIRES[config.wire]
    )
    assert hook is None
    event.current_stream_wait()
    assert torch.equal(stats, count + 7)
    check_received(buffer, config, batches, recv_x, count, handle)
    output = run_experts(buffer, config, recv_x, count)
    combined, event, hook = buffer.low_latency_combine(output, batch.topk_idx, batch.topk_weights, handle)
    assert hook is None
    event.current_stream_wait()
    assert torch.equal(combined, moe.reference(config, batch))
    assert not any(mask(buffer)[rank] for rank in active)


def mask(buffer: Buffer) -> list[int]:
    status = torch.full((buffer.max_ranks,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def new_buffer(group: dist.ProcessGroup | None, **options: Any) -> Buffer:
    options = {"max_ranks": SMALL.max_ranks, "timeout_ms": 60_000, **options}
    return Buffer(group, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True, **options)


def combine_of(buffer: Buffer, batch: moe.Batch, handle: Any) -> Callable[..., Any]:
    def combine(x: torch.Tensor, **options: Any) -> Any:
        return buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle, **options)

    return combine


def raises(kind: type[Exception], words: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        call(*args, **options)
