"""What the contenders exchange, and what they have to deliver. Every rank can tell what the others send."""

from __future__ import annotations

import torch

from bench.exchange.cuda_rank import Case, routing


def input_of(case: Case, rank: int) -> torch.Tensor:
    """Whole numbers from -8 to 7, which bf16 holds exactly."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 8, (case.tokens, case.hidden), generator=generator).to(torch.bfloat16)


def hosts_of(case: Case, rank: int) -> torch.Tensor:
    """bool ``[tokens, ranks]``: which ranks a token goes to."""
    ranks = torch.arange(case.ranks)
    return (routing(case, rank)[..., None] // (case.experts // case.ranks) == ranks).any(1)


def wanted_sums(case: Case, rank: int) -> torch.Tensor:
    """``[tokens, hidden]``. Each rank answers with its number plus one, so that a sum shows which ranks took part in it."""
    if case.layout == "rank":
        wanted = hosts_of(case, rank).float() @ torch.arange(1, case.ranks + 1, dtype=torch.float32)
    else:
        wanted = (routing(case, rank) // (case.experts // case.ranks) + 1).sum(1).float()
    return wanted[:, None].expand(-1, case.hidden)
