"""The step of a scheduler: where it begins, and whether what came of it may be used.

A step begins at the exchange of batch sizes between ranks (``MLPSyncBatchInfo.all_gather``): that is where views change. It
ends when the tokens of its batch are sampled: if a rank was lost meanwhile, all of that is done again with the same batch.
That is safe because a forward pass writes only to the cache slots of its batch, and what it writes there does not depend on
how often it runs.

The host waits for the step and learns from the status words whether it can be trusted. That costs nothing: SGLang waits for
the sampled tokens in the very next line. With overlap scheduling that is later, and :mod:`.overlap` says what is different.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eep.errors import RankRemoved
from sglang_patches import hooks
from sglang_patches.rank import overlap, rank_data_plane, rank_session, warm_up

T = TypeVar("T")


def register() -> None:
    hooks.hook("managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather", _all_gather)
    hooks.hook("managers.tp_worker.TpModelWorker.forward_batch_generation", _run_step)
    hooks.hook("managers.scheduler.Scheduler.run_batch", _run_batch)
    hooks.hook("managers.scheduler.Scheduler.process_batch_result", _process)
    hooks.hook("layers.sampler.Sampler._sync_token_ids_across_tp", _sample_alone, "replace")
    hooks.hook("managers.scheduler_components.batch_result_processor.release_kv_cache", overlap.release)
    hooks.hook("managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", overlap.count_later)
    hooks.hook("managers.scheduler_components.dp_attn.exchange_sync_rows", _exchange_rows, "replace")
    hooks.hook("model_executor.model_runner.ModelRunner.forward", _run_step)


def _all_gather(original: Callable[..., None], info: Any, device: Any, group: Any, **named: Any) -> None:
    """Ranks that are not in the view have sent nothing; SGLang takes their rows for those of idle ranks."""
    plane = rank_data_plane.get_plane()
    gather = partial(original, info, "cpu", _host_group() if plane.device != "cpu" else group, **named)
    if warm_up.is_under_way():
        gather()
    else:
        end_if_removed(plane.rank, lambda: rank_session.get_session().join().collect(gather))
    plane.use_for(all_decode=info.can_run_decode_cuda_graph)


def _exchange_rows(global_flat: torch.Tensor, local_row: torch.Tensor, group: Any) -> None:
    """Version 0.5.23 has one rank gather the rows and send them round; the others would be lost with it."""
    dist.all_gather_into_tensor(global_flat, local_row, group=group)


def _host_group() -> Any:
    """What is told are a few numbers that the host has and needs; SGLang would send them through the GPU."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


_is_stepping = False


def _run_step(original: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Generation is a forward pass and sampling; for other models the forward pass is all."""
    session = rank_session.get_session().joined
    if _is_stepping or session is None:  # it warms up, alone
        return original(*arguments, **named)
    plane = rank_data_plane.get_plane()
    work = partial(original, *arguments, **named)
    launched = overlap.current_launch()
    with _stepping():
        if launched is not None:
            result: T = end_if_removed(plane.rank, lambda: launched.begin(session, plane, work, batch=arguments[1]))
            return result

        def run_and_wait() -> T:
            result = work()
            plane.wait()
            return result

        return end_if_removed(plane.rank, lambda: session.run(run_and_wait, plane.using))


@contextlib.contextmanager
def _stepping() -> Iterator[None]:
    """Within a step there are no others, though SGLang's functions call each other."""
    global _is_stepping
    before, _is_stepping = _is_stepping, True
    try:
        yield
    finally:
        _is_stepping = before


# ---- overlap scheduling: see overlap.py ----


def _run_batch(original: Callable[..., T], scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> T:
    here = rank_session.get_session()
    session = here.joined
    if _is_stepping or session is None or not overlap.overlaps(scheduler):
        return original(scheduler, batch, *arguments, **named)

    def again(kept: Any) -> Any:
        with _stepping():
            return original(scheduler, kept, *arguments, **named)

    if overlap.must_wait_for_last_step(batch):
        end_if_removed(here.rank, session.settle)
        overlap.count_tokens(scheduler, batch)
    with overlap.launch(scheduler, again) as launched:
        result = original(scheduler, batch, *arguments, **named)
        launched.result = result
    return result


def _process(original: Callable[..., T], scheduler: Any, batch: Any, result: Any, *arguments: Any, **named: Any) -> T:
    """The results of a step are handed out, and nobody has looked at it yet."""
    here = rank_session.get_session()
    session = here.joined
    if session is not None and overlap.overlaps(scheduler):
        end_if_removed(here.rank, lambda: session.settle(overlap.count_launched_after(result)))
    return original(scheduler, batch, result, *arguments, **named)


def end_if_removed(rank: int, work: Callable[[], T]) -> T:
    """A rank that was taken out ends with a line, not with the traceback of a fault: nothing is wrong with it."""
    try:
        return work()
    except RankRemoved as removed:
        print(f"eep: rank {rank} ends: {removed}", flush=True)
        # At once, for SGLang's threads would keep the process from ending. Not 0: whether another life of it is wanted is
        # for the supervisor to say, and 0 would tell it that none is.
        os._exit(1)


def _sample_alone(*_: Any, **__: Any) -> None:
    """Where a grammar has a say, the ranks that share a request's attention agree on its token. Here that is one rank. It
    would ask itself, apart from the step, and be told that the view is over when another was lost: a survivor would end."""
