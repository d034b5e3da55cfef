"""Flags that ``--ep-backend eep`` implies on a GPU, beside those that it implies everywhere."""

from __future__ import annotations

import argparse
import os

from sglang_patches.cuda import float32

TIMEOUT_MS = 10_000.0
"""How long a rank waits for a peer within a step. A peer may take seconds to compile a kernel, which is no fault. A process
that dies is noticed at once in any case."""

KERNELS = ("triton", "deep_gemm")
"""The kernels for experts that are supported; see :mod:`sglang_patches.rank.token_forms`."""


def imply_gpu_flags(arguments: argparse.Namespace) -> None:
    """Set flags of SGLang, as far as this version has them, and variables that its processes inherit."""
    implied = {
        # Prefill runs eagerly: its tokens go through the buffer for any step.
        "disable_prefill_cuda_graph": True,
        # Autotuning would run steps of sizes that no buffer is made for, while a rank is alone.
        "disable_flashinfer_autotune": True,
    }
    for name, value in implied.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    kernels = getattr(arguments, "moe_runner_backend", None) or "auto"
    if kernels not in ("auto", *KERNELS):
        raise SystemExit(
            f"--moe-runner-backend {kernels} does not go together with --ep-backend eep, which has no form of tokens for "
            f"these kernels; choose from {', '.join(KERNELS)}"
        )
    if kernels == "auto":
        arguments.moe_runner_backend = KERNELS[0]
    # SGLang would refuse unequal free memory, and ranks that share a GPU see less of it the later they start.
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    if arguments.dtype == "float32":
        float32.prepare()
