"""The experts of the measurement of tiers: the same bytes in every process, so that each rank can show them."""

from __future__ import annotations

import numpy as np
import torch

from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec


def layout(experts: int) -> ExpertLayout:
    """Experts of 6 MiB: gate and up, and down, in bf16."""
    up, down = (
        TensorSpec(name, shape, torch.bfloat16)
        for name, shape in (("w13_weight", (2048, 1024)), ("w2_weight", (1024, 1024)))
    )
    return ExpertLayout(1, experts, (up, down))


def fill(memory: ExpertMemory, experts: int) -> None:
    for expert in range(experts):
        rng = np.random.default_rng(expert)
        for piece in memory.pieces(0, expert):
            piece.copy_(torch.from_numpy(rng.integers(0, 256, piece.numel(), dtype=np.uint8)))
