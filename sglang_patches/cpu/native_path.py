"""Fills gaps of SGLang's torch-native path on a CPU, by hooks. With a GPU none of this is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks
from sglang_patches.cpu import attention, compiler, model_paths

_FILL_VALUES = ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value")


def register() -> None:
    compiler.switch_off()
    _define_fill_values()
    attention.register()
    model_paths.register()
    hooks.hook("layers.moe.fused_moe_native.moe_forward_native", _moe_forward)
    hooks.hook("layers.moe.topk.select_experts", _select_experts)
    hooks.hook("model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", _prepare_mlp_sync_batch)


def _define_fill_values() -> None:
    """SGLang pads the batches of ranks in a step with sequences, and this backend does not say of what length."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in _FILL_VALUES:
        if name not in vars(TorchNativeAttnBackend):
            setattr(TorchNativeAttnBackend, name, _one)


def _one(_: object) -> int:
    return 1


def _moe_forward(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """Experts by local slot, -1 for "not here", which the original does not know.

    The original runs on (row, slot) pairs, one expert each and unweighted; the weighted sum over the experts of a row is
    taken as the original takes it, so that one rank alone gets the same bits.
    """
    weights, ids, logits = topk_output
    row, nth = (ids >= 0).nonzero(as_tuple=True)
    each = x.new_zeros((*ids.shape, x.shape[1]))
    if len(row):
        slots = ids[row, nth].unsqueeze(1)
        pairs = type(topk_output)(weights.new_ones(slots.shape), slots, logits)
        each[row, nth] = original(layer, x[row], pairs, moe_runner_config)
    result: torch.Tensor = (each.type(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1).type(x.dtype)
    return result


def _select_experts(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The torch-native gate does not accept where padding begins. So padding is cut off afterwards."""
    real = named.pop("num_token_non_padded", None)
    output = original(*arguments, **named)
    if real is not None:
        padding = torch.arange(output.topk_ids.shape[0], device=output.topk_ids.device) >= real
        output.topk_ids.masked_fill_(padding.unsqueeze(1), -1)
    return output


def _prepare_mlp_sync_batch(original: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Versions 0.5.17 and 0.5.18 make a tensor in pinned memory here, which needs a GPU."""
    real = torch.tensor

    def tensor(*given: Any, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        return real(*given, **others)

    torch.tensor = tensor
    try:
        original(*arguments, **named)
    finally:
        torch.tensor = real
