"""Overlap scheduling: while a step runs on the device, SGLang hands out the results of the last and prepares the next.

SGLang would launch the next step on top of tokens that nobody has looked at. Here a step is judged before the next one is
launched, at the latest when its own results are to be handed out; so the host works while the device does, and only the
launch itself waits. A step that turns out bad is run again as it was launched, and what came of it takes the place of what
was there.

What is kept for that is a copy of the batch, with the tensors that it had: SGLang puts new tensors into a batch and changes
none in place, since the device may still read them. Cache slots that were freed meanwhile are written again before anybody
reads them, since whoever has them now has not run yet.

Penalties on tokens that were used are better for it: SGLang counts a token when it prepares the step after, which with
overlap is before that token is known, so it counts an older one, or misses one. Here they are counted when the step is
launched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_patches import instance

_OF_THE_SCHEDULER = ("extend_input_len_per_req", "extend_logprob_start_len_per_req")
"""What SGLang notes in a result about its requests, which have gone on since."""


def overlaps(scheduler: Any) -> bool:
    """Whether results are processed later than they are made. Models that only embed are served without."""
    return bool(scheduler.enable_overlap and scheduler.is_generation)


def count_later(original: Callable[[Any], None], batch: Any) -> None:
    """Where SGLang would count the newest tokens for its penalties, and does not know them yet."""
    if not batch.enable_overlap:
        original(batch)


def count_tokens(scheduler: Any, batch: Any) -> None:
    """The newest token of each request, which is on the device and known to be good, counts for its penalties."""
    info = batch.sampling_info
    if info is None or not batch.forward_mode.is_decode() or not info.penalizer_orchestrator.is_required:
        return
    with scheduler.forward_stream_ctx:  # where the tokens are written, and the penalties read
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        newest = scheduler.future_map.output_tokens_buf[batch.req_pool_indices].to(torch.int64)
        info.penalizer_orchestrator.cumulate_output_tokens(newest)
    scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


class Launched:
    """A step as SGLang launched it, with all that it takes to run it again."""

    def __init__(self, scheduler: Any, run_batch: Callable[[Any], Any]) -> None:
        self._scheduler, self._run_batch = scheduler, run_batch
        self._batch: Any = None
        self._over: Any = None
        self.result: Any = None

    def begin(self, here: instance.Instance, forward: Callable[[], Any], batch: Any) -> Any:
        """From within ``run_batch``, where SGLang starts the forward pass of ``batch``."""
        self._batch = _keep(batch)
        using = here.using

        def start() -> Any:
            made = forward()
            if here.device != "cpu":
                self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._over.record()
            return made

        def again() -> Any:
            with here.through(using):
                self._again()

        return here.session.begin(start, using, again=again, wait=self._wait)

    def _wait(self) -> None:
        if self._over is not None:
            self._over.synchronize()

    def _again(self) -> None:
        batch = copy.copy(self._batch)
        fresh = self._run_batch(batch)
        if fresh.delay_sample_func is not None:  # where a grammar has a say, SGLang samples apart
            self._scheduler.launch_batch_sample_if_needed(fresh, batch)
        for name, value in vars(fresh).items():
            if name not in _OF_THE_SCHEDULER:
                setattr(self.result, name, value)
        if self._over is not None:
            fresh.copy_done.synchronize()


_newest: Launched | None = None
_is_launching = False


@contextmanager
def launch(scheduler: Any, run_batch: Callable[[Any], Any]) -> Iterator[Launched]:
    """While SGLang runs a batch."""
    global _newest, _is_launching
    _newest, _is_launching = Launched(scheduler, run_batch), True
    try:
        yield _newest
    finally:
        _is_launching = False


def launching() -> Launched | None:
    """The step that SGLang is about to start; None where it does not overlap any."""
    return _newest if _is_launching else None


def is_newest(result: Any) -> bool:
    return _newest is not None and _newest.result is result


def _keep(batch: Any) -> Any:
    """As it is now. What it samples with is made for one pass already, and is not to be made from it once more."""
    kept = copy.copy(batch)
    if batch.sampling_info is not None:
        info = kept.sampling_info = copy.copy(batch.sampling_info)
        info.copy_for_forward = lambda: info
    return kept
