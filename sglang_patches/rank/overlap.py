"""Overlap scheduling: while a step runs on the device, SGLang hands out the results of the last and prepares the next.

It even launches the next before the host has read the last, so that the device is never idle. Here a step is judged when its
results are to be handed out. If it is bad, so is the step that was launched on top of it. Both run again as they were
launched, one after the other, and their new results replace the old ones. No token of a bad step is ever used.

For that a copy of the batch is kept, with the tensors that it had. SGLang puts new tensors into a batch and changes none in
place, since the device may still read them. A cache slot that was freed meanwhile may be written once more. That is harmless:
its new owner has not run yet, and writes it before reading it. :func:`release` sees to it that the prefix cache holds no such
slot under tokens of a request. The newest token of each request stays on the device from step to step (SGLang's *future
map*). Before steps run again, it is put back to what they began with, the newest step first.

Some batches are launched only when the step before is known to be good: those with a grammar, or with penalties on tokens
that were used. SGLang counts a token for the penalties when it prepares the step after. With overlap the token is not known
by then, so SGLang counts an older one, or misses one. Here tokens are counted when the step is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch

from eep.recovery.session import Session
from sglang_patches.rank.rank_data_plane import RankDataPlane

T = TypeVar("T")

UNUSED_TOKEN = 2**31 - 1
"""A token that no model has."""
_OF_THE_SCHEDULER = ("extend_input_len_per_req", "extend_logprob_start_len_per_req")
"""Fields in which SGLang keeps the state of the requests at the launch. They have gone on since, so these stay."""


def overlaps(scheduler: Any) -> bool:
    """Whether SGLang hands out the results of a step after it has launched the next. It does not for models that embed."""
    return bool(scheduler.enable_overlap and scheduler.is_generation)


def must_wait_for_last_step(batch: Any) -> bool:
    """Whether a batch may be launched only when the step before is known to be good."""
    return bool(batch.has_grammar or _has_penalties(batch))


def _has_penalties(batch: Any) -> bool:
    info = batch.sampling_info
    return info is not None and bool(info.penalizer_orchestrator.is_required)


def release(original: Callable[..., T], req: Any, *arguments: Any, **named: Any) -> T:
    """Where SGLang gives back the cache of a request that has ended, and keeps it for others that begin with its tokens.

    By then SGLang has launched a step on top of the last, which writes the cache entry of the newest token. If that step is
    bad and runs again, another request may have this one's row in SGLang's tables, and the entry is wrong. So it goes into
    the prefix cache under a token that no request has.
    """
    tokens = req.output_ids
    if req.session is not None:  # a session keeps its row, and its tokens must stay as they are
        return original(req, *arguments, **named)
    if not tokens:  # aborted within its prompt, a part of which may still be on the device
        req.skip_radix_cache_insert = True
        return original(req, *arguments, **named)
    newest, tokens[-1] = tokens[-1], UNUSED_TOKEN
    try:
        return original(req, *arguments, **named)
    finally:
        tokens[-1] = newest


def count_later(original: Callable[[Any], None], batch: Any) -> None:
    """Where SGLang would count the newest tokens for its penalties. With overlap it does not know them yet."""
    if not batch.enable_overlap:
        original(batch)


def count_tokens(scheduler: Any, batch: Any) -> None:
    """Count the newest token of each request for its penalties. It is on the device, and known to be good."""
    if not batch.forward_mode.is_decode() or not _has_penalties(batch):
        return
    with scheduler.forward_stream_ctx:  # where the tokens are written, and the penalties read
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        newest = scheduler.future_map.output_tokens_buf[batch.req_pool_indices].to(torch.int64)
        batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(newest)
    scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


class LaunchedStep:
    """A step as SGLang launched it, with all that it takes to run it again. SGLang launches it inside its ``with`` block."""

    def __init__(
        self, scheduler: Any, run_batch: Callable[[Any], Any], plane: RankDataPlane, before: LaunchedStep | None
    ) -> None:
        self._scheduler, self._run_batch, self._plane = scheduler, run_batch, plane
        self._batch: Any = None
        self._began_with: torch.Tensor | None = None
        """The newest token of each request of a batch that decodes."""
        self._mark: Any = None
        """A CUDA event at the end of the forward pass, where SGLang's own comes too late."""
        self.before = before
        self.result: Any = None

    def __enter__(self) -> Self:
        global _newest, _is_launching
        _newest, _is_launching = self, True
        return self

    def __exit__(self, *_: object) -> None:
        global _is_launching
        _is_launching = False

    def begin(self, session: Session, forward: Callable[[], Any], batch: Any) -> Any:
        """Start the forward pass of ``batch``. Called from within ``run_batch``."""
        self._batch = _keep(batch)
        if batch.forward_mode.is_decode():
            self._began_with, self._batch.input_ids = batch.input_ids, None  # the future map has them
        plane, passage = self._plane, self._plane.passage

        def start() -> Any:
            made = forward()
            if made.delay_sample_func is not None and plane.device != "cpu":  # SGLang marks the end when it samples
                self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._mark.record()
            return made

        def again() -> Any:
            with plane.through(passage), _stream_context_of_its_own(self._scheduler):
                return self._run_again()

        return session.begin(start, passage, again=again, wait=self._wait, ahead=1)

    def _wait(self) -> None:
        if self._mark is not None:
            self._plane.wait_for(self._mark)
        elif (
            self.result is not None and self.result.copy_done is not None
        ):  # else it was not launched, or is over already
            self._plane.wait_for(self.result.copy_done)
            self.result.copy_done = None  # SGLang would wait for it once more

    def _run_again(self) -> Any:
        later = _newest if _newest is not None and _newest.before is self else None
        with self._scheduler.forward_stream_ctx:
            for launched in (later, self):
                if launched is not None:
                    launched._put_back()
        batch = _once_more(self._batch)
        fresh = self._run_batch(batch)
        self._scheduler._apply_war_barrier()  # as SGLang does after each launch
        if fresh.delay_sample_func is not None:  # with a grammar, SGLang samples later
            self._scheduler.launch_batch_sample_if_needed(fresh, batch)
        self._plane.wait_for(fresh.copy_done)
        if later is not None and later._began_with is not None:
            with self._scheduler.forward_stream_ctx:  # the stream that puts it back; on another, that might come first
                later._began_with = self._tokens()[later._batch.req_pool_indices]
        if self.result is None:  # it has only just been launched
            return fresh
        for name, value in vars(fresh).items():
            if name not in _OF_THE_SCHEDULER:
                setattr(self.result, name, value)
        return self.result

    def _put_back(self) -> None:
        if self._began_with is not None:
            self._tokens()[self._batch.req_pool_indices] = self._began_with

    def _tokens(self) -> torch.Tensor:
        tokens: torch.Tensor = self._scheduler.future_map.output_tokens_buf
        return tokens


_newest: LaunchedStep | None = None
_is_launching = False


def launch(scheduler: Any, run_batch: Callable[[Any], Any], plane: RankDataPlane) -> LaunchedStep:
    """The next step. SGLang is to run its batch inside the ``with`` block."""
    if _newest is not None:
        _newest.before = None  # its predecessor's results are handed out already
    return LaunchedStep(scheduler, run_batch, plane, before=_newest)


def current_launch() -> LaunchedStep | None:
    """The step that SGLang is launching; None where steps do not overlap."""
    return _newest if _is_launching else None


def count_launched_after(result: Any) -> int:
    """How many steps SGLang has launched after the one with that result."""
    after = 0
    step = _newest
    while step is not None and step.result is not result:
        step, after = step.before, after + 1
    return after


@contextmanager
def _stream_context_of_its_own(scheduler: Any) -> Iterator[None]:
    """Torch keeps the stream to go back to in the context. None may be entered twice, and SGLang may be in its own."""
    before = scheduler.forward_stream_ctx
    scheduler.forward_stream_ctx = scheduler.device_module.stream(scheduler.forward_stream)
    try:
        yield
    finally:
        scheduler.forward_stream_ctx = before


def _keep(batch: Any) -> Any:
    """A copy of the batch as it is now."""
    kept = _copy(batch)
    if batch.sampling_info is not None:
        kept.sampling_info = _copy(batch.sampling_info)
    return kept


def _once_more(kept: Any) -> Any:
    """A batch to run from a kept one. Its sampling info is ready for a forward pass, and must not be prepared again."""
    batch = _keep(kept)
    if (info := batch.sampling_info) is not None:
        info.copy_for_forward = lambda: info
    return batch


def _copy(thing: T) -> T:
    """Like ``copy.copy``, in a fraction of the time: every step needs it."""
    made = type(thing).__new__(type(thing))
    made.__dict__.update(thing.__dict__)
    return made
