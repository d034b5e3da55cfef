"""Which GPU a rank runs on: its own, or a shared one where there are fewer GPUs than ranks.

Ranks that share a GPU should run under MPS. Without it they take turns, and every exchange of tokens waits for a time slice.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_patches import hooks


def register() -> None:
    hooks.hook("managers.data_parallel_controller.maybe_reindex_device_id", _share)


def are_shared(arguments: argparse.Namespace, ranks: int) -> bool:
    """Whether two of that many ranks run on the same GPU. Counting GPUs opens none."""
    first, step = getattr(arguments, "base_gpu_id", 0), getattr(arguments, "gpu_id_step", 1)
    gpus = max(torch.cuda.device_count(), 1)
    return len({(first + step * rank) % gpus for rank in range(ranks)}) < ranks


@contextlib.contextmanager
def _share(original: Callable[..., Any], gpu_id: int) -> Iterator[int]:
    """SGLang numbers devices as if each rank had its own. Counting them opens none."""
    with original(gpu_id % max(torch.cuda.device_count(), 1)) as device:
        yield device
