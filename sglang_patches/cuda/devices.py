"""Which GPU a rank runs on: its own, or, where there are fewer GPUs than ranks, one that it shares.

Ranks that share a GPU should run under MPS; without it they take turns, and every exchange of tokens waits for a time slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_patches import hooks


def register() -> None:
    hooks.hook("managers.data_parallel_controller.maybe_reindex_device_id", _share)


@contextlib.contextmanager
def _share(original: Callable[..., Any], gpu_id: int) -> Iterator[int]:
    """SGLang numbers devices as if there were one for each rank. Counting them opens none."""
    with original(gpu_id % max(torch.cuda.device_count(), 1)) as device:
        yield device
