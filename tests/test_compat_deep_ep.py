"""The DeepEP interface, in real processes: results bit for bit, two in flight, the mask, death and return.

Each test starts one process per rank, which runs the function ``play_<name>`` below and says how it went.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing as mp
import os
import pathlib
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat.deep_ep import Buffer
from tests import moe

PATIENCE_S = 120.0
WIRES = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "fp8_pow2": {"round_scale": True},
    "fp8_ue8m0": {"round_scale": True, "use_ue8m0": True},
}
SMALL = moe.Config(ranks=3, max_ranks=4, max_tokens=6, hidden=512, topk=3, local_experts=2, layout="expert")

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "eep.buffer", "eep.faults", "tests.moe"])


# ---- processes ----


def _run(
    connection: Connection,
    play: str,
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
        globals()[play](group, *args)
        connection.send("")
    except BaseException:
        connection.send(traceback.format_exc())


class Fleet:
    """Processes that each play a part; killed, whatever happens, at the end."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._started: list[tuple[Any, Connection]] = []

    def start(self, play: str, size: int, *args: Any, **environment: str) -> list[int]:
        """A process group of ``size`` ranks; returns what to give to :meth:`finish`."""
        store = str(self._directory / f"store{len(self._started)}")
        first = len(self._started)
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_run, args=(theirs, play, rank, size, store, environment, args))
            process.start()
            theirs.close()
            self._started.append((process, ours))
        return list(range(first, first + size))

    def finish(self, numbers: Sequence[int], dead: Sequence[int] = ()) -> None:
        """Waits for their ends: all well, but for those that are to be found ``dead`` by SIGKILL."""
        for number in numbers:
            process, connection = self._started[number]
            if number in dead:
                process.join(PATIENCE_S)
                assert process.exitcode == -signal.SIGKILL
                continue
            assert connection.poll(PATIENCE_S), f"process {number} hangs"
            said = connection.recv()
            assert not said, f"process {number}:\n{said}"
            process.join(PATIENCE_S)

    def close(self) -> None:
        for process, connection in self._started:
            process.kill()
            process.join(PATIENCE_S)
            connection.close()


@pytest.fixture
def fleet(tmp_path: pathlib.Path) -> Iterator[Fleet]:
    with contextlib.closing(Fleet(tmp_path)) as fleet:
        yield fleet


# ---- a step, and what it must give ----


def quantize(x: torch.Tensor, wire: str) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 e4m3 with one scale per 128 values: a number, a power of two, or the exponent of one."""
    groups = x.float().unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1).clamp(min=1e-4)
    limit = torch.full_like(largest, 448)  # a tensor: dividing a plain number rounds twice
    scales, inverse = largest / limit, limit / largest
    if wire != "fp8":
        mantissa, exponent = torch.frexp(scales)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # exact powers of two stay
        scales, inverse = torch.exp2(exponent.float()), torch.exp2(-exponent.float())
        if wire == "fp8_ue8m0":
            scales = (exponent + 127).to(torch.uint8)
    return (groups * inverse.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scales


def unpack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales row by row, and of four exponents to an int32 one byte each."""
    rows = torch.empty(scales.shape, dtype=scales.dtype).copy_(scales)
    return rows.view(torch.uint8) if scales.dtype == torch.int32 else rows


def reference(config: moe.Config, batch: moe.Batch) -> torch.Tensor:
    x = batch.x.float() if config.wire == "bf16" else moe.dequantize(*quantize(batch.x, config.wire))
    return moe.reference(with_wire(config, "bf16"), moe.Batch(x, batch.topk_idx, batch.topk_weights))


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
        scale = None if scales is None else unpack_scales(scales[local, :rows])
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
                    sent, sent_scales = quantize(batch.x[wanted], config.wire)
                    assert torch.equal(unpack_scales(scales[local, begin:end]), sent_scales)
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
    assert torch.equal(combined, reference(config, batch))
    assert not any(mask(buffer)[rank] for rank in active)


def mask(buffer: Buffer) -> list[int]:
    status = torch.full((buffer.max_ranks,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def new_buffer(group: dist.ProcessGroup | None, **options: Any) -> Buffer:
    options = {"max_ranks": SMALL.max_ranks, "timeout_ms": 60_000, **options}
    return Buffer(group, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True, **options)


# ---- values ----


def play_values(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    everybody = tuple(range(SMALL.ranks))
    assert mask(buffer) == [0, 0, 0, 1]
    for seed, wire in enumerate(WIRES):
        config = with_wire(SMALL, wire)
        step(buffer, config, seed, everybody)
        step(buffer, config, seed + 10, everybody, {0: 0, 1: SMALL.max_tokens})
        step(buffer, config, seed + 20, everybody, {0: 0, 1: 0, 2: 0})
    # Another K, then other sizes, then the first ones again.
    step(buffer, dataclasses.replace(SMALL, topk=6), 30, everybody)
    larger = dataclasses.replace(SMALL, max_tokens=9, local_experts=3, hidden=128, topk=8)
    step(buffer, larger, 31, everybody, {0: 9})
    step(buffer, with_wire(larger, "fp8"), 32, everybody)
    batch = moe.make_batch(larger, buffer.rank, 0, everybody)
    raises(ValueError, "multiple of 512", dispatch, buffer, larger, batch, **WIRES["fp8_ue8m0"])
    step(buffer, SMALL, 33, everybody)
    buffer.barrier()
    buffer.destroy()


def test_values_in_every_format(fleet: Fleet) -> None:
    fleet.finish(fleet.start("play_values", SMALL.ranks))


# ---- hooks, two in flight, arguments ----


def raises(kind: type[Exception], words: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        call(*args, **options)


def play_in_flight(group: dist.ProcessGroup) -> None:
    buffer, config = new_buffer(group), SMALL
    active = tuple(range(config.ranks))
    raises(eep.EepError, "clean_low_latency_buffer", buffer.barrier)
    buffer.clean_low_latency_buffer(config.max_tokens, config.hidden, config.ranks * config.local_experts)
    buffer.clean_low_latency_buffer(config.max_tokens, config.hidden, config.ranks * config.local_experts)

    for round in range(3):
        batches = [{r: moe.make_batch(config, r, 2 * round + i, active) for r in active} for i in range(2)]
        mine = [batch[buffer.rank] for batch in batches]
        stats = torch.zeros(config.local_experts, dtype=torch.int32)
        flights = [
            dispatch(
                buffer,
                config,
                batch,
                use_fp8=False,
                return_recv_hook=True,
                cumulative_local_expert_recv_stats=stats,
            )
            for batch in mine
        ]
        assert not stats.any()
        raises(eep.EepError, "two dispatches are in flight", dispatch, buffer, config, mine[0])
        raises(eep.EepError, "in flight", buffer.clean_low_latency_buffer, 1, 128, config.ranks)
        order = (0, 1) if round else (1, 0)
        for i in order:
            recv_x, count, handle, _, hook = flights[i]
            raises(eep.EepError, "out of turn", combine_of(buffer, mine[i], handle), recv_x)
            hook()
            raises(eep.EepError, "out of turn", hook)
        assert torch.equal(stats, flights[0][1] + flights[1][1])
        hooks = []
        for i in order:
            recv_x, count, handle, _, _ = flights[i]
            check_received(buffer, config, batches[i], recv_x, count, handle)
            output = run_experts(buffer, config, recv_x, count)
            out = torch.zeros(len(mine[i].x), config.hidden, dtype=torch.bfloat16)
            options: dict[str, Any] = {"out": out, "return_recv_hook": True}
            if i == 0:  # the outputs are written where combine takes them from
                buffer.get_next_low_latency_combine_buffer(handle).copy_(output)
                options, output = {**options, "zero_copy": True}, torch.zeros_like(output)
            combined, _, hook = combine_of(buffer, mine[i], handle)(output, **options)
            assert combined is out
            hooks.append((i, hook, combined))
        for i, hook, combined in hooks:
            hook()
            assert torch.equal(combined, reference(config, mine[i]))
            raises(eep.EepError, "combined already", hook)
            raises(eep.EepError, "combined already", combine_of(buffer, mine[i], flights[i][2]), combined)
            raises(eep.EepError, "combined already", buffer.get_next_low_latency_combine_buffer, flights[i][2])
    # With one in flight, what the dispatch before it gave still stands.
    first = dispatch(buffer, config, mine[0], use_fp8=False)
    kept = [tensor.clone() for tensor in (first[0], first[1], *first[2][:2])]
    combine_of(buffer, mine[0], first[2])(run_experts(buffer, config, first[0], first[1]))
    second = dispatch(buffer, config, mine[1], use_fp8=False)
    for tensor, copy in zip((first[0], first[1], *first[2][:2]), kept, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
    combine_of(buffer, mine[1], second[2])(second[0])
    buffer.barrier()
    buffer.destroy()


def combine_of(buffer: Buffer, batch: moe.Batch, handle: Any) -> Callable[..., Any]:
    def combine(x: torch.Tensor, **options: Any) -> Any:
        return buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle, **options)

    return combine


def test_hooks_and_two_in_flight(fleet: Fleet) -> None:
    fleet.finish(fleet.start("play_in_flight", SMALL.ranks))


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
    fleet.finish(fleet.start("play_bad_arguments", SMALL.ranks))


# ---- death and return ----


def play_survivor(group: dist.ProcessGroup) -> None:
    buffer, config = new_buffer(group, timeout_ms=3000), SMALL
    step(buffer, config, 0, (0, 1, 2))
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    # Its tokens are absent, and so is what its experts would have added.
    batches = {rank: moe.make_batch(config, rank, 1, (0, 1, 2)) for rank in (0, 1)}
    batch = batches[buffer.rank]
    recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False)
    assert mask(buffer) == [0, 0, 1, 1]
    check_received(buffer, config, batches, recv_x, count, handle)
    combined, _, _ = combine_of(buffer, batch, handle)(run_experts(buffer, config, recv_x, count))
    without_it = torch.where(batch.topk_idx // config.local_experts == 2, -1, batch.topk_idx)
    expected = reference(config, moe.Batch(batch.x, without_it, batch.topk_weights))
    assert torch.equal(combined, expected)

    buffer.low_latency_clean_mask_buffer()
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.low_latency_update_mask_buffer(2, True)
    assert mask(buffer) == [0, 0, 1, 1]
    buffer.barrier()
    step(buffer, config, 2, (0, 1))
    # A token may still name experts of a masked rank; they add nothing.
    recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False)
    check_received(buffer, config, batches, recv_x, count, handle)
    combined, _, _ = combine_of(buffer, batch, handle)(run_experts(buffer, config, recv_x, count))
    assert torch.equal(combined, expected)

    buffer.connect_ranks([2])
    play_together(buffer)


def play_newcomer(group: dist.ProcessGroup, joins_alone: bool) -> None:
    buffer = new_buffer(None if joins_alone else group, timeout_ms=3000)
    assert buffer.group_size == 3
    buffer.connect_ranks([0, 1])  # as a program written for both would; it joins in its first dispatch
    play_together(buffer)


def play_together(buffer: Buffer) -> None:
    """From the return of rank 2 on; then rank 3 comes, which was not there at the launch."""
    config = SMALL
    if buffer.rank != 3:
        assert mask(buffer) == [0, 0, 0, 1]
        step(buffer, config, 3, (0, 1, 2))
        buffer.low_latency_update_mask_buffer(3, False)
    for seed, wire in enumerate(WIRES):
        step(buffer, with_wire(config, wire), 10 + seed, (0, 1, 2, 3))
    assert mask(buffer) == [0, 0, 0, 0]
    larger = dataclasses.replace(config, max_tokens=10)
    step(buffer, larger, 20, (0, 1, 2, 3))
    if buffer.rank != 3:
        buffer.disconnect_ranks([3])
        step(buffer, larger, 21, (0, 1, 2))
        buffer.barrier()
    buffer.destroy()


def test_survivors_go_on_and_replacements_join(fleet: Fleet, rendezvous: eep.Rendezvous) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path)}
    first = fleet.start("play_survivor", 3, **place)
    fleet.finish(first[2:], dead=first[2:])
    joining = [
        number
        for rank in (2, 3)
        for number in fleet.start("play_newcomer", 1, rank == 3, EEP_RANK=str(rank), EEP_WORLD_SIZE="3", **place)
    ]
    fleet.finish([*first[:2], *joining])


# ---- alone ----


def test_size_hint_is_what_a_buffer_takes(rendezvous: eep.Rendezvous) -> None:
    hint = Buffer.get_low_latency_rdma_size_hint(8, 512, 4, 16)
    config = moe.Config(max_ranks=4, max_tokens=8, hidden=512, topk=16, local_experts=4, layout="expert")
    with config.buffer(0, rendezvous, channels=2) as buffer:
        assert os.fstat(buffer._region.fd).st_size == hint
    with pytest.raises(ValueError, match="multiple of the 4 ranks"):
        Buffer.get_low_latency_rdma_size_hint(8, 512, 4, 15)
    with pytest.raises(ValueError, match="max_tokens"):
        Buffer.get_low_latency_rdma_size_hint(0, 512, 4, 16)


def test_a_joining_process_needs_its_numbers(rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EEP_RENDEZVOUS", str(rendezvous.path))
    monkeypatch.setenv("EEP_RANK", "1")
    with pytest.raises(ValueError, match="EEP_WORLD_SIZE"):
        Buffer(None)
    monkeypatch.setenv("EEP_WORLD_SIZE", "2")
    monkeypatch.setenv("EEP_RANK", "one")
    with pytest.raises(ValueError, match="EEP_RANK"):
        Buffer(None)
    monkeypatch.setenv("EEP_RANK", "2")
    with pytest.raises(ValueError, match="too few"):
        Buffer(None)
