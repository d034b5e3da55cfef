"""Which token is drawn, as a function of its row alone: probabilities, seed and position.

The Gumbel trick with noise from MurmurHash3 of (seed, position, token): SGLang's own numbers for a plain draw. On a GPU they
come from SGLang's kernel. Its kernel for a CPU is in a package that has no build, so there torch computes them.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def draw_tokens(
    weights: torch.Tensor, tokens: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw a column of ``weights`` [n, m] for each row, as [n, 1]. ``tokens`` [n, m]: the token of each column, if it is not
    the column's number. Weights need not sum to one; a weight of 0 is never drawn unless all are 0."""
    rows, width = weights.shape
    noise = _noise(seeds[:rows], positions[:rows], width, weights.device)
    if tokens is not None:
        noise = noise.gather(1, tokens)
    return noise.add_(weights.to(torch.float64).log()).argmax(dim=1, keepdim=True)


def keep_likely(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each row from the largest down, 0 where a filter drops them, and their tokens."""
    weights, tokens = probs.sort(dim=-1, descending=True, stable=True)
    before = weights.cumsum(dim=-1) - weights
    place = torch.arange(probs.shape[-1], device=probs.device).view(1, -1)
    dropped = (place >= top_ks.view(-1, 1)) | (before > top_ps.view(-1, 1))
    if min_ps is not None:
        dropped |= weights < weights[:, :1] * min_ps.view(-1, 1)
    return weights.masked_fill(dropped, 0.0), tokens


def _noise(seeds: torch.Tensor, positions: torch.Tensor, width: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise in float64, [n, width]."""
    columns = torch.arange(width, device=device)
    if device.type == "cpu":
        hashed = murmur_hash(seeds, positions, columns)
    else:
        from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

        hashed = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    uniform = hashed.to(torch.float64) / _LOW
    # Neither end may become infinite.
    return uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_().log_().neg_()


def murmur_hash(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits, seed 0) of the 16 bytes (seed: 8, position: 4, column: 4), as int64, [n, columns]."""
    seeds, positions = seeds.to(torch.int64), positions.to(torch.int64)
    state = torch.zeros_like(seeds)
    for block in (seeds, seeds >> 32, positions):
        state = _mix(state, block)
    state = _mix(state.view(-1, 1), columns.view(1, -1)) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _LOW
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # Products of more than 64 bits overflow, which leaves the low 32 bits right.
    block = _rotate(((block & _LOW) * 0xCC9E2D51) & _LOW, 15) * 0x1B873593 & _LOW
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotate(words: torch.Tensor, by: int) -> torch.Tensor:
    return ((words << by) | (words >> (32 - by))) & _LOW
