"""The kernels that pick the experts of each row, launched once what they read is there.

SGLang launches them with programmatic dependent launch: they may begin while the stores of the kernel before them are still
on their way, and wait for those later. Before version 0.5.21 they load the bias of the gate before that wait. The bias is
written by the very kernel before: SGLang makes a tensor of zeros, or converts the bias of the model, for each layer of each
step. On a GPU that other processes keep busy, blocks of four rows then saw what had been in that memory before. Their rows
went to the wrong experts, with the wrong weights. SGLang's pull request 38290 moves the load behind the wait.

Launched the usual way, these kernels begin when the kernel before them is over.
"""

from __future__ import annotations

from sglang_patches import hooks

TRITON = "kernels.ops.moe.moe_fused_gate.is_arch_support_pdl"
RADIX = "kernels.ops.moe.moe_route_radix.is_arch_support_pdl"
"""What the two routers ask before they are launched."""


def register() -> None:
    hooks.rebind(TRITON, launches_early)
    hooks.rebind(RADIX, launches_early)


def launches_early() -> bool:
    return False
