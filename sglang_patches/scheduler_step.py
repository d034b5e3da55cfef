"""The step of a scheduler: where it begins, and whether what came of it may be used.

A step begins at the exchange of batch sizes between ranks (``MLPSyncBatchInfo.all_gather``): that is where views change. It
ends with the forward pass: if a rank was lost meanwhile, the pass is run again with the same batch. That is safe because a
pass writes only to the cache slots of its batch, and what it writes there does not depend on how often it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eep.errors import RankRemoved
from sglang_patches import hooks, instance

T = TypeVar("T")


def register() -> None:
    hooks.hook("managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather", _all_gather)
    hooks.hook("managers.scheduler_components.dp_attn.exchange_sync_rows", _exchange_rows, "replace")
    hooks.hook("model_executor.model_runner.ModelRunner.forward", _forward)


def _all_gather(original: Callable[..., None], info: Any, *arguments: Any, **named: Any) -> None:
    """Ranks that are not in the view have sent nothing; SGLang takes their rows for those of idle ranks."""
    here = instance.current()
    _until_removed(
        here.rank, lambda: here.session.collect(partial(original, info, *arguments, **named), here.run_empty)
    )


def _exchange_rows(global_flat: torch.Tensor, local_row: torch.Tensor, group: Any) -> None:
    """Version 0.5.23 has one rank gather the rows and send them round; the others would be lost with it."""
    dist.all_gather_into_tensor(global_flat, local_row, group=group)


def _forward(original: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    here = instance.current()
    if not here.has_joined:  # it warms up, alone
        return original(runner, *arguments, **named)
    return _until_removed(here.rank, lambda: here.session.run(partial(original, runner, *arguments, **named)))


def _until_removed(rank: int, work: Callable[[], T]) -> T:
    """A rank that was taken out ends with a line, not with the traceback of a fault: nothing is wrong with it."""
    try:
        return work()
    except RankRemoved as removed:
        print(f"eep: rank {rank} ends: {removed}", flush=True)
        # At once, for SGLang's threads would keep the process from ending. Not 0: whether another life of it is wanted is
        # for the supervisor to say, and 0 would tell it that none is.
        os._exit(1)
