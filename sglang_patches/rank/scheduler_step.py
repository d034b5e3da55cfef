"""The step of a scheduler: where it begins, and whether its results may be used.

A step begins at the exchange of batch sizes between ranks (``MLPSyncBatchInfo.all_gather``): its boundary, where views
change. It ends when the tokens of its batch are sampled. If a rank was lost meanwhile, the step runs again with the same
batch. That is safe: a forward pass writes only to the cache slots of its batch, and always the same.

The host waits for the step and reads in the status words whether it can be trusted. That costs nothing: SGLang waits for the
sampled tokens in the very next line. With overlap scheduling it waits later; :mod:`.overlap` says what is different.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eep.errors import RankRemoved
from sglang_patches import hooks
from sglang_patches.rank import mask_notes, next_life, overlap, rank_data_plane, rank_session, warm_up
from sglang_patches.rank.kv import context_notes
from sglang_patches.rank.rank_data_plane import RankDataPlane

T = TypeVar("T")


def register() -> None:
    hooks.hook("managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather", _all_gather)
    hooks.hook("managers.tp_worker.TpModelWorker.forward_batch_generation", _run_step)
    hooks.hook("managers.scheduler.Scheduler.run_batch", _run_batch)
    hooks.hook("managers.scheduler.Scheduler.is_disable_overlap_for_batch", _note_order)
    hooks.hook("managers.scheduler.Scheduler.process_batch_result", _process)
    hooks.hook("layers.sampler.Sampler._sync_token_ids_across_tp", _sample_alone, "replace")
    hooks.hook("managers.scheduler_components.batch_result_processor.release_kv_cache", overlap.release)
    hooks.hook("managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", overlap.count_later)
    hooks.hook("managers.scheduler_components.dp_attn.exchange_sync_rows", _exchange_rows, "replace")
    hooks.hook("model_executor.model_runner.ModelRunner.forward", _run_step)


def _all_gather(original: Callable[..., None], info: Any, device: Any, group: Any, **named: Any) -> None:
    """Ranks outside the view send nothing; SGLang takes their rows for those of idle ranks."""
    plane = rank_data_plane.get_plane()
    gather = partial(original, info, "cpu", _host_group() if plane.device != "cpu" else group, **named)
    if warm_up.is_under_way():
        gather()
    else:
        if plane.device == "cpu":
            group.set_timeout(timedelta(milliseconds=plane.patience.between_steps_ms))
        end_if_removed(plane.rank, lambda: _collect(gather, plane.patience.between_steps_ms / 1000))
        next_life.look_whether_free()
        plane.allow_for(prefills=info.is_extend_in_batch, sizes=info.global_num_tokens)
        plane.run()
    plane.use_for(all_decode=info.can_run_decode_cuda_graph, sizes=info.global_num_tokens)


def _collect(gather: Callable[[], None], timeout: float) -> None:
    """``timeout``: how many seconds a peer may take to say which experts it has ready."""
    here = rank_session.get_session()
    session = here.join()
    if here.overhead is not None:
        here.overhead.stepped()
    here.coverage.close_slots()
    for turn in here.turns:
        turn.switch_if_agreed()
        gather = turn.asking(gather, timeout)
    session.collect(gather)


def _exchange_rows(global_flat: torch.Tensor, local_row: torch.Tensor, group: Any) -> None:
    """In version 0.5.23 one rank gathers the rows and sends them to all. Its loss would be the loss of all."""
    dist.all_gather_into_tensor(global_flat, local_row, group=group)


def _host_group() -> Any:
    """SGLang would exchange these few numbers through the GPU, though the host has them and needs them."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


_is_stepping = False


def _run_step(original: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Generation is a forward pass and sampling. For other models the forward pass is the whole step."""
    session = rank_session.get_session().joined
    plane = rank_data_plane.get_plane()
    if _is_stepping or session is None:  # this rank is still alone, and warms up; or the step runs again
        if session is not None:
            _note_masked(plane, arguments)
        return original(*arguments, **named)
    if (balancer := rank_session.get_session().balancer) is not None:
        balancer.stepped()
    _note_masked(plane, arguments)
    work = partial(original, *arguments, **named)
    launched = overlap.current_launch()
    with _stepping():
        if launched is not None:
            result: T = end_if_removed(plane.rank, lambda: launched.begin(session, work, batch=arguments[1]))
            return result

        def run_and_wait() -> T:
            _note_masked(plane, arguments)  # the step may run again in another view
            result = work()
            plane.wait()
            return result

        return end_if_removed(plane.rank, lambda: session.run(run_and_wait, plane.passage))


def _note_masked(plane: RankDataPlane, arguments: Sequence[Any]) -> None:
    if plane.masks and plane.location.placement.degraded:
        mask_notes.note(arguments[1])


@contextlib.contextmanager
def _stepping() -> Iterator[None]:
    """Within a step no other begins, though SGLang's hooked functions call each other."""
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
    context_notes.launched(batch)
    if _is_stepping or session is None or not overlap.overlaps(scheduler):
        return original(scheduler, batch, *arguments, **named)

    def again(kept: Any) -> Any:
        with _stepping():
            return original(scheduler, kept, *arguments, **named)

    if overlap.must_wait_for_last_step(batch):
        end_if_removed(here.rank, lambda: session.settle(owed=rank_data_plane.get_plane().passage))
        overlap.count_tokens(scheduler, batch)
    with overlap.launch(scheduler, again, rank_data_plane.get_plane()) as launched:
        result = original(scheduler, batch, *arguments, **named)
        launched.result = result
    return result


_owes_step = False
"""Whether SGLang has yet to launch the step whose sizes the ranks have exchanged."""


def _note_order(original: Callable[..., bool], scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> bool:
    """SGLang asks whether to hand out the results of the last step before it launches ``batch``."""
    global _owes_step
    hands_out_first = original(scheduler, batch, *arguments, **named)
    _owes_step = bool(hands_out_first and batch)
    return hands_out_first


def _process(original: Callable[..., T], scheduler: Any, batch: Any, result: Any, *arguments: Any, **named: Any) -> T:
    """SGLang is about to hand out the results of a step, which is judged only now."""
    global _owes_step
    here = rank_session.get_session()
    session = here.joined
    owed = rank_data_plane.get_plane().passage if _owes_step else None
    _owes_step = False
    if session is not None and overlap.overlaps(scheduler):
        end_if_removed(here.rank, lambda: session.settle(overlap.count_launched_after(result), owed=owed))
    handed_out = original(scheduler, batch, result, *arguments, **named)
    context_notes.note(batch)
    return handed_out


def end_if_removed(rank: int, work: Callable[[], T]) -> T:
    """Run ``work``. A rank that was taken out meanwhile ends here with one line and no traceback: it has no fault."""
    try:
        return work()
    except RankRemoved as removed:
        print(f"eep: rank {rank} ends: {removed}", flush=True)
        # At once: SGLang's threads would keep the process from ending. Not 0, which would tell the supervisor that this
        # rank wants no other incarnation; the supervisor decides that.
        os._exit(1)


def _sample_alone(*_: Any, **__: Any) -> None:
    """With a grammar, SGLang has the ranks that share the attention of a request agree on its token. Here that is one rank.
    It would ask itself outside of the step; if a peer was lost, the call would fail and a survivor would end."""
