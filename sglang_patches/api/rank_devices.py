"""On which device each rank runs, for operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def device_of(server_args: Any) -> Callable[[int], str]:
    """A function from a rank to the name of its device, as SGLang numbers them; ranks may share one."""
    kind = str(getattr(server_args, "device", None) or "cuda")
    if kind == "cpu":
        return lambda rank: "cpu"
    import torch

    first, step = getattr(server_args, "base_gpu_id", 0), getattr(server_args, "gpu_id_step", 1)
    count = max(torch.cuda.device_count(), 1)
    return lambda rank: f"{kind}:{(first + step * rank) % count}"
