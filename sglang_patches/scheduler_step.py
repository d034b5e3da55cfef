"""The step of a scheduler: where it begins, and whether what came of it may be used.

A step begins at the exchange of batch sizes between ranks (``MLPSyncBatchInfo.all_gather``): that is where views change. It
ends when the tokens of its batch are sampled: if a rank was lost meanwhile, all of that is done again with the same batch.
That is safe because a forward pass writes only to the cache slots of its batch, and what it writes there does not depend on
how often it runs.

On a GPU the host waits here for the step, and learns from the status words whether it can be trusted. That costs nothing:
SGLang waits for the sampled tokens in the very next line.
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
    hooks.hook("managers.tp_worker.TpModelWorker.forward_batch_generation", _step)
    hooks.hook("managers.scheduler_components.dp_attn.exchange_sync_rows", _exchange_rows, "replace")
    hooks.hook("model_executor.model_runner.ModelRunner.forward", _step)


def _all_gather(original: Callable[..., None], info: Any, device: Any, group: Any, **named: Any) -> None:
    """Ranks that are not in the view have sent nothing; SGLang takes their rows for those of idle ranks."""
    here = instance.current()
    gather = partial(original, info, "cpu", _host_group() if here.device != "cpu" else group, **named)
    _until_removed(here.rank, lambda: here.session.collect(gather, here.run_empty))
    here.use_for(all_decode=info.can_run_decode_cuda_graph)


def _exchange_rows(global_flat: torch.Tensor, local_row: torch.Tensor, group: Any) -> None:
    """Version 0.5.23 has one rank gather the rows and send them round; the others would be lost with it."""
    dist.all_gather_into_tensor(global_flat, local_row, group=group)


def _host_group() -> Any:
    """What is told are a few numbers that the host has and needs; SGLang would send them through the GPU."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


_is_stepping = False


def _step(original: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Generation is a forward pass and sampling; for other models the forward pass is all."""
    global _is_stepping
    here = instance.current()
    if _is_stepping or not here.has_joined:  # it warms up, alone
        return original(*arguments, **named)

    def step() -> T:
        result = original(*arguments, **named)
        here.wait()
        return result

    _is_stepping = True
    try:
        return _until_removed(here.rank, lambda: here.session.run(step, here.using))
    finally:
        _is_stepping = False


def _until_removed(rank: int, work: Callable[[], T]) -> T:
    """A rank that was taken out ends with a line, not with the traceback of a fault: nothing is wrong with it."""
    try:
        return work()
    except RankRemoved as removed:
        print(f"eep: rank {rank} ends: {removed}", flush=True)
        # At once, for SGLang's threads would keep the process from ending. Not 0: whether another life of it is wanted is
        # for the supervisor to say, and 0 would tell it that none is.
        os._exit(1)
