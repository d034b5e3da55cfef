"""Rank processes that use the operators, and DeepEP's interface, on CUDA tensors."""

from __future__ import annotations

import dataclasses
import os

import torch

import eep
from eep.compat import deep_ep
from eep.data_plane.tokens import RankTokens
from tests import moe
from tests.rank_program import RankProgram


class OperatorProgram(RankProgram):
    """A step through ``eep.dispatch`` and ``eep.combine``, eagerly and as a graph."""

    def operator_step(self, seed: int, active: tuple[int, ...]) -> eep.Status:
        batch = moe.make_batch(self.config, self.buffer.rank, seed, active)
        on_gpu = batch.to("cuda")
        tokens = eep.dispatch(self.buffer, on_gpu.x, on_gpu.topk_idx, on_gpu.topk_weights)
        output = eep.combine(self.buffer, moe.run_experts(self.buffer, tokens), tokens)
        torch.cuda.synchronize()
        assert torch.equal(output.cpu(), moe.reference(self.config, batch))
        return self.buffer.status()

    def operator_graph(self, seed: int, active: tuple[int, ...]) -> eep.Status:
        """All ranks capture at the same time, and replay with other tokens."""
        config = self.config
        batches = [moe.make_batch(config, self.buffer.rank, seed + i, active, config.max_tokens) for i in range(3)]
        at = batches[0].to("cuda")

        def step() -> torch.Tensor:
            tokens = eep.dispatch(self.buffer, at.x, at.topk_idx, at.topk_weights)
            assert isinstance(tokens, RankTokens)
            ids = torch.where(tokens.topk_idx >= 0, tokens.topk_idx + self.buffer.rank * config.local_experts, -1)
            rows = moe.weighted_sum(moe.dequantize(tokens.x, tokens.scales), ids, tokens.topk_weights)
            return eep.combine(self.buffer, rows.to(self.buffer.combine_dtype), tokens)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = step()
        for batch in batches:
            for field in dataclasses.fields(batch):
                getattr(at, field.name).copy_(getattr(batch, field.name))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(output.cpu(), moe.reference(config, batch))
        return self.buffer.status()


class DeepEpProgram:
    """A rank behind ``eep.compat.deep_ep.Buffer``, of which each makes its own, as a process that joins later would."""

    def __init__(self, rank: int, path: str, config: moe.Config, timeout_ms: float, incarnation: int | None) -> None:
        self.config, self.rank = config, rank
        # What stands for the process group, which only tells the ranks where to meet.
        group = _Alone(rank, config.ranks)
        os.environ["EEP_RENDEZVOUS"] = path
        self.buffer = deep_ep.Buffer(group, max_ranks=config.max_ranks, timeout_ms=timeout_ms)  # type: ignore[arg-type]

    def low_latency(self, seed: int, active: tuple[int, ...], wire: str, with_hooks: bool) -> list[int]:
        """One dispatch and combine, compared; the mask afterwards."""
        config = dataclasses.replace(self.config, layout="expert", wire=wire)
        batch = moe.make_batch(config, self.rank, seed, active)
        at, buffer = batch.to("cuda"), self.buffer
        experts = config.local_experts * config.ranks
        stats = torch.zeros(config.local_experts, dtype=torch.int32, device="cuda")
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            at.x,
            at.topk_idx,
            config.max_tokens,
            experts,
            cumulative_local_expert_recv_stats=stats,
            use_fp8=wire != "bf16",
            round_scale=wire == "fp8_ue8m0",
            use_ue8m0=wire == "fp8_ue8m0",
            return_recv_hook=with_hooks,
        )
        if hook is not None:
            hook()
        event.current_stream_wait()
        x, scales = received if isinstance(received, tuple) else (received, None)
        output = torch.zeros(x.shape, dtype=torch.bfloat16, device="cuda")
        for local, count in enumerate(counts.tolist()):
            of_expert = None if scales is None else moe.unpack_scales(scales[local, :count])
            values = moe.dequantize(x[local, :count], of_expert)
            ids = values.new_full((count,), self.rank * config.local_experts + local)
            output[local, :count] = moe.expert(values, ids).to(torch.bfloat16)
        combined, _, hook = buffer.low_latency_combine(
            output, at.topk_idx, at.topk_weights, handle, return_recv_hook=with_hooks
        )
        if hook is not None:
            hook()
        torch.cuda.synchronize()
        assert torch.equal(stats, counts)
        assert torch.equal(combined.cpu(), moe.reference(config, batch)), f"rank {self.rank}, {wire}"
        return self._mask()

    def low_latency_in_flight(self, seed: int, active: tuple[int, ...]) -> list[int]:
        """Two dispatches before their combines, one of them combined twice, and one that is not combined."""
        config = dataclasses.replace(self.config, layout="expert", wire="bf16")
        buffer, first = self.buffer, self.rank * config.local_experts
        ids = torch.arange(first, first + config.local_experts, device="cuda").unsqueeze(-1)
        batches = [moe.make_batch(config, self.rank, seed + i, active) for i in range(3)]
        flights = []
        for batch in batches:
            at = batch.to("cuda")
            received, _, handle, _, _ = buffer.low_latency_dispatch(
                at.x, at.topk_idx, config.max_tokens, config.local_experts * config.ranks, use_fp8=False
            )
            flights.append((at, moe.expert(received.float(), ids).to(torch.bfloat16), handle))
        for i in (1, 2, 1):  # the first was lost when the third took its place
            at, output, handle = flights[i]
            combined, _, _ = buffer.low_latency_combine(output, at.topk_idx, at.topk_weights, handle)
            torch.cuda.synchronize()
            assert torch.equal(combined.cpu(), moe.reference(config, batches[i])), f"rank {self.rank}, dispatch {i}"
        return self._mask()

    def low_latency_graph(self, seed: int, active: tuple[int, ...]) -> list[int]:
        """Captured once, outputs written where combine takes them from, and replayed with other tokens."""
        config = dataclasses.replace(self.config, layout="expert", wire="bf16")
        batches = [moe.make_batch(config, self.rank, seed + i, active, config.max_tokens) for i in range(3)]
        at, buffer = batches[0].to("cuda"), self.buffer
        first = self.rank * config.local_experts
        ids = torch.arange(first, first + config.local_experts, device="cuda").unsqueeze(-1)

        def step() -> torch.Tensor:
            received, _, handle, _, _ = buffer.low_latency_dispatch(
                at.x, at.topk_idx, config.max_tokens, config.local_experts * config.ranks, use_fp8=False
            )
            output = buffer.get_next_low_latency_combine_buffer(handle)
            output.copy_(moe.expert(received.float(), ids))  # rows that do not count as well: their number is not known
            return buffer.low_latency_combine(output, at.topk_idx, at.topk_weights, handle, zero_copy=True)[0]

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            combined = step()
        for batch in batches:
            for field in dataclasses.fields(batch):
                getattr(at, field.name).copy_(getattr(batch, field.name))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(combined.cpu(), moe.reference(config, batch)), f"rank {self.rank}"
        return self._mask()

    def _mask(self) -> list[int]:
        mask = torch.zeros(self.config.max_ranks, dtype=torch.int32, device="cuda")
        self.buffer.low_latency_query_mask_buffer(mask)
        return [int(value) for value in mask.tolist()]


class _Alone:
    """A process group that knows its size and nothing else."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
