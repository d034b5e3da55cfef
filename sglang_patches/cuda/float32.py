"""SGLang in float32 on a GPU, for runs whose tokens are compared: in bfloat16 they depend on the batch.

Some of SGLang's kernels are for 16 bits only. In float32 torch's operators replace them, and the Triton experts keep 32 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks, served_type

ASKED_FOR = "EEP_CUDA_FLOAT32"
"""The environment variable that asks for it without ``--ep-backend eep``, for a single rank to compare with."""
_EXPERTS = "layers.moe.moe_runner.triton_utils.fused_moe."


def is_requested() -> bool:
    return os.environ.get(ASKED_FOR) == "1"


def prepare() -> None:
    """Call before Triton is imported: it must not round products of float32 to TF32."""
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def register() -> None:
    served_type.register()
    hooks.hook("layers.layernorm.RMSNorm.forward_cuda", _native)
    hooks.hook("layers.rotary_embedding.base.RotaryEmbedding.forward_cuda", _rotate)
    hooks.hook("models.utils.can_use_fused_inplace_qknorm", _may_fuse_norms)
    hooks.hook(_EXPERTS + "invoke_fused_moe_kernel", _multiply)
    hooks.hook(_EXPERTS + "silu_and_mul", _activate)
    hooks.hook(_EXPERTS + "moe_sum_reduce", _add_up)


def _native(original: Callable[..., Any], norm: Any, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    if x.dtype != torch.float32 or x.numel() == 0:
        return original(norm, x, *arguments, **named)
    return norm.forward_native(x, *arguments, **named)


def _rotate(
    original: Callable[..., Any], rope: Any, positions: torch.Tensor, query: torch.Tensor, *arguments: Any, **named: Any
) -> Any:
    forward = original if query.dtype != torch.float32 else type(rope).forward_native
    return forward(rope, positions, query, *arguments, **named)


def _may_fuse_norms(original: Callable[..., bool], head_dim: int, dtype: torch.dtype) -> bool:
    return dtype != torch.float32 and original(head_dim, dtype)


def _multiply(original: Callable[..., Any], a: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    if a.dtype == torch.float32:
        import triton.language as tl

        named["compute_type"] = tl.float32
    return original(a, *arguments, **named)


def _activate(original: Callable[..., Any], x: torch.Tensor, out: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    if x.dtype != torch.float32:
        return original(x, out, *arguments, **named)
    half = x.shape[-1] // 2
    # Rows of experts on other ranks hold garbage; their results are not used.
    return torch.mul(torch.nn.functional.silu(x[..., :half]), x[..., half:], out=out)


def _add_up(original: Callable[..., Any], x: torch.Tensor, out: torch.Tensor, factor: float) -> Any:
    if x.dtype != torch.float32:
        return original(x, out, factor)
    return torch.sum(x, dim=1, out=out).mul_(factor)
