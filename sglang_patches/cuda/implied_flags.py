"""What ``--ep-backend eep`` stands for on a GPU, beside what it stands for everywhere."""

from __future__ import annotations

import argparse
import os

from sglang_patches.cuda import float32

TIMEOUT_MS = 10_000.0
"""How long a rank waits within a step. Kernels are compiled when they are first used, which takes seconds and is no fault; a
process that dies is seen at once in any case."""

KERNELS = ("triton", "deep_gemm")
"""For experts; see :mod:`sglang_patches.rank.token_forms`."""


def imply_gpu_flags(arguments: argparse.Namespace) -> None:
    """Sets flags of SGLang, as far as this version has them, and variables that its processes inherit."""
    implied = {
        # Prefill runs eagerly: its tokens go through the buffer for any step.
        "disable_prefill_cuda_graph": True,
        # It would run steps of its own while a rank is alone, of sizes that no buffer is made for.
        "disable_flashinfer_autotune": True,
    }
    for name, value in implied.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    kernels = getattr(arguments, "moe_runner_backend", None) or "auto"
    if kernels not in ("auto", *KERNELS):
        raise SystemExit(
            f"--moe-runner-backend {kernels} cannot be used with --ep-backend eep: choose from {', '.join(KERNELS)}, whose "
            "kernels take tokens in a form that eep gives"
        )
    if kernels == "auto":
        arguments.moe_runner_backend = KERNELS[0]
    # Ranks that share a GPU see less of its memory the later they start.
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    if arguments.dtype == "float32":
        float32.prepare()
