"""A rank on a GPU serves requests of its own before it joins: a few prompts of different lengths, one by one and together.

A rank compiles and loads a kernel when it first needs it, which may take a second. Its peers would wait for it in the middle
of a step. Worse, CUDA may not load a kernel before those under way are over, and one of ours may wait for a peer that waits
for this rank: then all stand still until the deadline. The decode graphs are captured before a rank joins, but that covers
decode only, and no more rows than the largest graph has.

These requests come out of SGLang's receiver as any others do, and go through its own loop while the rank is still alone. What
they produce is sent nowhere. Requests of clients wait in the socket meanwhile.
"""

from __future__ import annotations

import os
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_patches import cpu, hooks
from sglang_patches.rank import rank_data_plane, step_sizes

ASKED_FOR = "EEP_WARM_UP"
"""The environment variable that makes ranks on a CPU warm up too. They have nothing to compile; it is for tests."""
_COMPONENTS = "managers.scheduler_components."
_NEW_TOKENS = 3
_WITHIN = 600.0
"""Seconds that it may take. Compiling kernels takes time, but a rank that is not done by then will never be."""
_OURS_ALONE = f"eep-warm-up-{secrets.token_hex(8)}"
"""The key of these requests in SGLang's prefix cache. Clients choose theirs, and cannot guess this one."""
_FIRST_TOKENS = 250
"""So many different tokens every model knows."""
_IDLE_ROUNDS = 2
"""How often SGLang's loop must go round idle before the warm-up is over. By then the last overlapped step is over too."""


def register() -> None:
    if cpu.is_asked_for() and os.environ.get(ASKED_FOR) != "1":
        return
    hooks.hook(_COMPONENTS + "request_receiver.SchedulerRequestReceiver.recv_requests", _receive_requests)
    hooks.hook(_COMPONENTS + "output_streamer.SchedulerOutputStreamer.stream_output", _stream)


def choose_prompts(chunk: int, in_graphs: int = 0, running: int = 0) -> list[tuple[int, ...]]:
    """Lengths of prompts; those of a round are prefilled together, and then decode together. Kernels differ by the number of
    tokens, and by whether a number is 1 or divisible by 16. ``chunk`` is the most that is prefilled at once; one token more
    comes in two parts. Up to ``in_graphs`` rows decode in graphs, and up to ``running`` may decode at once."""
    lengths = [(1,), (2,), (16,), (17,), (3, 18), (31, 32, 33), (5, 16, 24, 48), (8,) * 8, (64,), (chunk + 1,)]
    lengths += [(size,) for size in _sizes(96, chunk)]
    lengths += [(1,) * rows for rows in sorted({in_graphs + 1, *_sizes(in_graphs + 1, running)}) if rows <= running]
    return [each for each in lengths if sum(each) <= chunk + 1]


def _sizes(first: int, last: int) -> list[int]:
    """Powers of two and what lies midway between them: libraries choose another kernel about as often."""
    sizes = (size for power in range(32) for size in (1 << power, 3 << power))
    return sorted(size for size in sizes if first <= size <= last)


@dataclass
class WarmUp:
    """The requests that are still to come, and those under way."""

    rounds: list[tuple[int, ...]]
    make: Callable[[int, int], Any]
    """Makes a request, from its number and the length of its prompt."""
    until: float
    """When the warm-up must be over, by ``time.monotonic``."""
    _under_way: set[str] = field(default_factory=set)
    _count: int = 0
    _idle: int = 0

    @property
    def is_over(self) -> bool:
        return not self.rounds and not self._under_way and self._idle >= _IDLE_ROUNDS

    def receive(self) -> list[Any]:
        """The requests that SGLang's loop is to begin now. RuntimeError if the warm-up takes too long: then this process
        ends, and the supervisor starts another."""
        if time.monotonic() > self.until:
            raise RuntimeError(f"this rank did not warm up in time: no answer yet to {sorted(self._under_way)}")
        if self._under_way:
            return []
        if not self.rounds:
            self._idle += 1
            return []
        lengths = self.rounds.pop(0)
        numbers = range(self._count, self._count + len(lengths))
        self._count = numbers.stop
        self._under_way.update(map(_name, numbers))
        return [self.make(number, length) for number, length in zip(numbers, lengths, strict=True)]

    def finished(self, names: Iterable[str]) -> None:
        self._under_way.difference_update(names)


def _name(number: int) -> str:
    return f"eep-warm-up-{number}"


_warm_up: WarmUp | None = None


def is_under_way() -> bool:
    """Whether this rank still serves only its own requests."""
    return _warm_up is not None and not _warm_up.is_over


def _receive_requests(original: Callable[..., Any], receiver: Any, *arguments: Any, **named: Any) -> Any:
    global _warm_up
    if _warm_up is None:
        _warm_up = WarmUp(_choose_rounds(), _request, time.monotonic() + _WITHIN)
    if is_under_way():
        requests = _warm_up.receive()
        if is_under_way():
            return requests
        rank_data_plane.get_plane().wait()
    return original(receiver, *arguments, **named)


def _choose_rounds() -> list[tuple[int, ...]]:
    from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_server_args

    if get_server_args().is_embedding:
        return []  # such models take other requests
    chunk = int(get_schedule().chunked_prefill_size)
    if cpu.is_asked_for():
        return choose_prompts(chunk)
    in_graphs = step_sizes.largest_graph(get_exec().graph.cuda_graph_config.decode)
    return choose_prompts(chunk, in_graphs, step_sizes.running_at_once(get_schedule(), get_parallel()))


def _stream(original: Callable[..., Any], streamer: Any, reqs: Sequence[Any], *arguments: Any, **named: Any) -> Any:
    if not is_under_way():
        return original(streamer, reqs, *arguments, **named)
    assert _warm_up is not None
    _warm_up.finished(request.rid for request in reqs if request.finished())
    return None


def _request(number: int, length: int) -> Any:
    """A request as SGLang's front end makes it; every second one samples. No two begin alike, or the second would find the
    work of the first in the cache. No client may find it there: a rank that is alone reaches only its own experts, so its
    answers are not those of the model."""
    beginning = [number % _FIRST_TOKENS + 1, number // _FIRST_TOKENS + 1]
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    drawn = {"temperature": 1.0, "top_k": 20, "top_p": 0.9} if number % 2 else {"temperature": 0.0}
    parameters = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, **drawn)
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=_name(number),
        input_text=None,
        input_ids=array("q", [*beginning, *([1] * (length - 2))][:length]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=parameters,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=_OURS_ALONE,
    )
