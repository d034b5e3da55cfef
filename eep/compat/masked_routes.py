"""Leaving out the experts of masked ranks, for callers that route to them and say so.

A token that names an expert outside the view makes the status of a step bad, because its sum lacks a part. A caller that has
masked the rank knows that, and wants the sum of the rest.
"""

from __future__ import annotations

import torch

from eep.view import View


class MaskedRoutes:
    """Which experts are in the view, in one tensor: a captured graph sees what :meth:`show` has last shown."""

    def __init__(self, max_ranks: int, local_experts: int, device: torch.device) -> None:
        self._local_experts = local_experts
        # Behind the experts: one place for what is no expert, which is for others to refuse, and one for -1.
        self._keeps = torch.ones(max_ranks * local_experts + 2, dtype=torch.bool, device=device)

    def show(self, view: View) -> None:
        """The experts of the members of ``view`` are those that get tokens from now on."""
        members = torch.zeros(view.max_ranks, dtype=torch.bool, device="cpu")
        members[list(view.active)] = True
        self._keeps[:-2].copy_(members.repeat_interleave(self._local_experts))

    def of(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """A copy in which the experts of other ranks are -1."""
        return torch.where(self._keeps[topk_idx.clamp(-1, len(self._keeps) - 2)], topk_idx, -1)
