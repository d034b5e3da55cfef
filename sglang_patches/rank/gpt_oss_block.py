"""The MoE block of gpt-oss, which SGLang has only for ranks that add up their parts with a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks


def register() -> None:
    hooks.hook("models.gpt_oss.GptOssSparseMoeBlock.forward", _forward)


def _forward(
    _: Callable[..., torch.Tensor], block: Any, hidden_states: torch.Tensor, forward_batch: Any = None
) -> torch.Tensor:
    """The experts return sums over all ranks. A rank without tokens takes part: its experts serve those of others."""
    logits, _bias = block.router(hidden_states)
    output: torch.Tensor = block.experts(hidden_states, block.topk(hidden_states, logits))
    return output
