"""Where the rows of an expanding dispatch lie, one for each choice of a token, by local expert; and in which order what comes
back is added. Pure functions."""

from __future__ import annotations

import dataclasses

import torch

from eep.compat.normal_layout import Routes


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """The rows of each expert begin at a multiple of the alignment; tokens keep their order."""

    of_choice: torch.Tensor
    """int32 ``[tokens, topk]``: the row of each choice, -1 where the expert is not here."""
    counts: torch.Tensor
    """int32 ``[local_experts]``: how many rows each expert has."""
    aligned: torch.Tensor
    """The same, padded to the alignment."""

    @classmethod
    def of(cls, topk_idx: torch.Tensor, local_experts: int, alignment: int) -> Slots:
        """``topk_idx``: local experts, -1 for those elsewhere."""
        flat = torch.where(topk_idx >= 0, topk_idx, local_experts).flatten()
        per_expert = torch.zeros(local_experts + 1, dtype=torch.int64, device=flat.device)
        per_expert.scatter_add_(0, flat, torch.ones_like(flat))
        counts = per_expert[:local_experts]
        aligned = (counts + alignment - 1) // alignment * alignment
        by_expert, order = flat.sort(stable=True)
        first_sorted = per_expert.cumsum(0) - per_expert
        begins = torch.cat([aligned.cumsum(0) - aligned, aligned.new_zeros(1)])
        row = begins[by_expert] + torch.arange(len(flat), device=flat.device) - first_sorted[by_expert]
        slots = torch.empty_like(flat)
        slots[order] = torch.where(by_expert < local_experts, row, -1)
        return cls(slots.view(topk_idx.shape).to(torch.int32), counts.to(torch.int32), aligned.to(torch.int32))

    @property
    def ends(self) -> torch.Tensor:
        """int32 ``[local_experts]``: behind the last row of each expert, padding not counted."""
        return (self.aligned.cumsum(0) - self.aligned + self.counts).to(torch.int32)

    @property
    def rows(self) -> int:
        return int(self.aligned.sum())

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` ``[tokens, ...]`` in the row of every choice of their token, zeros between."""
        token, k = (self.of_choice >= 0).nonzero(as_tuple=True)
        spread = values.new_zeros(self.rows, *values.shape[1:])
        spread[self.of_choice[token, k].long()] = values[token]
        return spread

    def spread_choices(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` ``[tokens, topk]`` in the rows of their choices, zeros between."""
        chosen = self.of_choice >= 0
        spread = values.new_zeros(self.rows)
        spread[self.of_choice[chosen].long()] = values[chosen]
        return spread

    def gather_choices(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 ``[tokens, topk]``: of ``values``, one for each row, that of each choice; zeros where there is none."""
        if not len(values):
            return torch.zeros(self.of_choice.shape, dtype=torch.float32, device=values.device)
        return torch.where(self.of_choice >= 0, values[self.of_choice.clamp(min=0).long()], 0.0)


def choices_of_rows(topk_idx: torch.Tensor, routes: Routes, local_experts: int) -> torch.Tensor:
    """bool ``[rows, topk]``: for each row that was sent, which choices of its token are of experts of the rank it went to."""
    rank = torch.arange(len(routes.send), device=topk_idx.device)
    to_rank = rank.repeat_interleave(torch.tensor(routes.send, device=topk_idx.device))
    choices = topk_idx[routes.tokens]
    return (choices >= 0) & (choices // local_experts == to_rank.unsqueeze(1))


def last_choices(owned: torch.Tensor) -> torch.Tensor:
    """Of each row of ``owned`` the last choice alone: DeepEP adds what a rank gives for a token at that place."""
    left = owned.flip(1).cumsum(1).flip(1)
    return owned & (left == 1)


def rows_by_choice(owned: torch.Tensor, routes: Routes, tokens: int) -> torch.Tensor:
    """int64 ``[tokens, topk]``: which of the rows that came back belongs to each choice, -1 where none does. The rows come
    as those that were sent, and by choice."""
    row, k = owned.nonzero(as_tuple=True)
    of_choice = torch.full((tokens, owned.shape[1]), -1, dtype=torch.int64, device=owned.device)
    of_choice[routes.tokens[row], k] = torch.arange(len(row), device=owned.device)
    return of_choice


def add_in_order(start: torch.Tensor, rows: torch.Tensor, of_choice: torch.Tensor) -> torch.Tensor:
    """Adds to ``start``, fp32 ``[tokens, ...]``, the row of each choice, the first choice first. One call of a sum would
    leave the order to the device."""
    if len(rows):
        for k in range(of_choice.shape[1]):
            row = of_choice[:, k].long()
            start += torch.where((row >= 0).unsqueeze(1), rows[row.clamp(min=0)].float(), 0.0)
    return start


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same values, the rows next to each other, each column at a multiple of 16 bytes."""
    rows, columns = scales.shape
    made = scales.new_empty(columns, -(-rows // 4) * 4)[:, :rows]
    made.copy_(scales.t())
    return made.t()
