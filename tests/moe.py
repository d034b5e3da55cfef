"""A small mixture of experts: batches, expert functions, and a plain torch reference that ranks are compared with.

Every expert is an element-wise function of its own, so that a token that went to the wrong expert, came back to the
wrong place or was added in the wrong order shows in the result. The reference takes the same operations in the same
order without any exchange, so that results are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

import eep
from eep.data_plane.passage import Passage, count_portions
from eep.data_plane.tokens import ExpertTokens, RankTokens


@dataclass(frozen=True)
class Config:
    ranks: int = 4
    max_ranks: int = 4
    max_tokens: int = 8
    hidden: int = 256
    topk: int = 4
    local_experts: int = 4
    layout: str = "rank"
    wire: str = "bf16"
    combine: str | None = None
    device: str = "cpu"
    shares_gpu: bool = False
    overlaps: bool = False
    room: int | None = None
    """For how many tokens of a rank buffers have room; None for a whole batch."""

    def buffer(self, rank: int, rendezvous: eep.Rendezvous | str, **more: object) -> eep.Buffer:
        return eep.Buffer(
            rank,
            rendezvous=rendezvous,
            max_ranks=self.max_ranks,
            max_tokens=self.room or self.max_tokens,
            hidden=self.hidden,
            topk=self.topk,
            local_experts=self.local_experts,
            layout=self.layout,
            wire=self.wire,
            combine=self.combine,
            device=self.device,
            shares_gpu=self.shares_gpu,
            overlaps=self.overlaps,
            **more,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: str) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def make_batch(config: Config, rank: int, seed: int, active: tuple[int, ...], tokens: int | None = None) -> Batch:
    """Random tokens of one rank, routed to distinct experts of the active ranks, now and then to none (-1)."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    if tokens is None:
        tokens = int(torch.randint(0, config.max_tokens + 1, (1,), generator=random))
    homes = torch.cat([torch.arange(config.local_experts) + rank * config.local_experts for rank in active])
    dtype = torch.float32 if config.wire == "f32" else torch.bfloat16
    x = torch.randn(tokens, config.hidden, generator=random).to(dtype)
    idx = torch.full((tokens, config.topk), -1, dtype=torch.int64)
    for token in range(tokens):
        chosen = homes[torch.randperm(len(homes), generator=random)[: config.topk]]
        idx[token, : len(chosen)] = chosen
    idx[torch.rand(idx.shape, generator=random) < 0.1] = -1
    return Batch(x, idx, torch.rand(tokens, config.topk, generator=random))


def expert(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What expert ``ids[i]`` makes of row ``i``, in fp32."""
    ids = ids.to(torch.float32).unsqueeze(-1)
    return x * (1 + ids / 8) + (ids - 3) / 16


# ---- what a rank does with the tokens it got ----


def run_experts(buffer: eep.Buffer, tokens: RankTokens | ExpertTokens) -> torch.Tensor:
    return _run_by_rank(buffer, tokens) if isinstance(tokens, RankTokens) else _run_by_expert(buffer, tokens)


def _run_by_rank(buffer: eep.Buffer, tokens: RankTokens) -> torch.Tensor:
    rows = tokens.rows()
    x, idx, weights = tokens.x[rows], tokens.topk_idx[rows], tokens.topk_weights[rows]
    scales = None if tokens.scales is None else tokens.scales[rows]
    total = weighted_sum(
        dequantize(x, scales), torch.where(idx >= 0, idx + buffer.rank * buffer.local_experts, -1), weights
    )
    output = buffer.combine_input(tokens.sent.channel)
    output[rows] = total.to(output.dtype)
    return output


def _run_by_expert(buffer: eep.Buffer, tokens: ExpertTokens) -> torch.Tensor:
    output = torch.full(tokens.x.shape, float("nan"), dtype=buffer.combine_dtype, device=tokens.x.device)
    for local, count in enumerate(tokens.expert_counts.tolist()):
        scales = None if tokens.scales is None else unpack_scales(tokens.scales[local, :count])
        x = dequantize(tokens.x[local, :count], scales)
        output[local, :count] = expert(x, x.new_full((count,), buffer.rank * buffer.local_experts + local)).to(
            output.dtype
        )
    return output


def unpack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Four exponents to an int32, as grouped matrix kernels take them, as one byte each."""
    if scales.dtype != torch.int32:
        return scales
    return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def dequantize(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return x.float()
    if scales.dtype == torch.uint8:
        scales = (scales.to(torch.int32) << 23).view(torch.float32)  # exact on every device, which exp2 is not
    return (x.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)


def weighted_sum(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape, device=x.device)
    for k in range(ids.shape[1]):
        term = weights[:, k, None] * expert(x, ids[:, k])
        total = total + torch.where(ids[:, k, None] >= 0, term, 0.0)
    return total


# ---- the same without an exchange ----


def quantize(x: torch.Tensor, wire: str) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 e4m3 with one scale per 128 values: the definition that kernels are held to."""
    groups = x.float().unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1).clamp(min=1e-4)
    if wire == "fp8":
        limit = torch.full_like(largest, 448)  # "448 / largest" would take a reciprocal and round twice
        scales, inverse = largest / limit, limit / largest
    else:
        mantissa, exponent = torch.frexp(largest / 448)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # exact powers of two stay
        scales, inverse = torch.exp2(exponent.float()), torch.exp2(-exponent.float())
        if wire == "fp8_ue8m0":
            scales = (exponent + 127).to(torch.uint8)
    values = (groups * inverse.unsqueeze(-1)).flatten(-2)
    return values.to(torch.float8_e4m3fn), scales


def came_back(config: Config, outputs: torch.Tensor) -> torch.Tensor:
    """What the source of a token reads of what an expert gave, in fp32."""
    return outputs.float() if config.combine is None else dequantize(*quantize(outputs, config.combine))


def reference(config: Config, batch: Batch) -> torch.Tensor:
    """What combine must give for a batch, bit for bit."""
    x = dequantize(*quantize(batch.x, config.wire)) if config.wire.startswith("fp8") else batch.x.float()
    dtype = torch.float32 if config.wire == "f32" else torch.bfloat16
    ids, weights = batch.topk_idx, batch.topk_weights
    total = torch.zeros(x.shape)
    if config.layout == "rank":
        for rank in range(config.max_ranks):
            here = torch.where(ids // config.local_experts == rank, ids, -1)
            partial = came_back(config, weighted_sum(x, here, weights).to(dtype))
            total = total + torch.where((here >= 0).any(1, keepdim=True), partial, 0.0)
    else:
        for k in range(ids.shape[1]):
            term = weights[:, k, None] * came_back(config, expert(x, ids[:, k]).to(dtype))
            total = total + torch.where(ids[:, k, None] >= 0, term, 0.0)
    return total.to(dtype)


def step(
    buffer: eep.Buffer,
    config: Config,
    seed: int,
    active: tuple[int, ...],
    tokens: int | None = None,
    portions: int | None = None,
) -> torch.Tensor:
    """The exchange of a rank's batch. ``portions``: by default as many as the batches need that ranks draw."""
    batch = make_batch(config, buffer.rank, seed, active, tokens).to(config.device)
    output = exchange(buffer, batch, Passage(portions=portions or portions_of(config, seed, active)))
    if config.device == "cuda":
        torch.cuda.current_stream().synchronize()  # as a server does before it samples; then the status can be read
    return output.cpu()


def portions_of(config: Config, seed: int, active: tuple[int, ...]) -> int:
    """In how many portions the ranks exchange the batches that they draw."""
    if config.room is None:
        return 1
    return count_portions((len(make_batch(config, rank, seed, active).x) for rank in active), config.room)


def exchange(buffer: eep.Buffer, batch: Batch, passage: Passage) -> torch.Tensor:
    """Dispatch, experts and combine, portion by portion."""
    output = torch.empty(batch.x.shape, dtype=buffer.combine_dtype, device=batch.x.device)
    for rows in passage.cut(len(batch.x)):
        received = buffer.dispatch(batch.x[rows], batch.topk_idx[rows], batch.topk_weights[rows])
        buffer.combine(run_experts(buffer, received), received, out=output[rows])
    return output
