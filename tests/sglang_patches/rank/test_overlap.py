"""Overlap scheduling: tokens on the device are read and written on one stream only. The scheduler is made up. With the
real one, on a CPU without streams, tests/sglang shows that the tokens are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eep.data_plane.passage import Passage
from sglang_patches.rank import overlap


class Device:
    """Which stream is the current one."""

    def __init__(self) -> None:
        self.current = "schedule"

    def stream(self, stream: str) -> StreamContext:
        return StreamContext(self, stream)


class StreamContext:
    """Like torch's: it keeps the stream to go back to in itself."""

    def __init__(self, device: Device, stream: str) -> None:
        self._device, self._stream, self._before = device, stream, ""

    def __enter__(self) -> None:
        self._before, self._device.current = self._device.current, self._stream

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before


class OnOneStream:
    """Tokens that only the stream of the forward pass may touch."""

    def __init__(self, tokens: list[int], device: Device) -> None:
        self.tensor, self._device = torch.tensor(tokens), device

    def __getitem__(self, at: Any) -> torch.Tensor:
        assert self._device.current == "forward", "read on another stream"
        return self.tensor[at]

    def __setitem__(self, at: Any, value: torch.Tensor) -> None:
        assert self._device.current == "forward", "written on another stream"
        self.tensor[at] = value


class Session:
    """Starts steps, and runs them again at once or when a test asks for it."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.again: list[Any] = []
        self.waits: list[Any] = []
        self._at_once = at_once

    def begin(self, start: Any, passage: Passage, *, again: Any, wait: Any, ahead: int) -> Any:
        self.again.append(again)
        self.waits.append(wait)
        made = start()
        return again() if self._at_once else made


@contextmanager
def through(_: Passage) -> Iterator[None]:
    yield


def decode(rows: list[int]) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        req_pool_indices=torch.tensor(rows),
        input_ids=None,
        sampling_info=None,
    )


class Mark:
    """A CUDA event in the work of a device."""

    def __init__(self) -> None:
        self.recorded = self.waited_for = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "nothing is waited for"
        self.waited_for = True


class Scheduler:
    """A step adds 10 to the newest token of each of its requests; a bad one makes it -1."""

    def __init__(
        self, tokens: list[int], session: Session, *, device: str = "cpu", samples_later: bool = False
    ) -> None:
        self.device_module = Device()
        self.forward_stream = "forward"
        self.forward_stream_ctx = self.device_module.stream("forward")
        self.tokens = OnOneStream(tokens, self.device_module)
        self.future_map = SimpleNamespace(output_tokens_buf=self.tokens)
        self.barriers = 0
        self._samples_later = samples_later
        self._session: Any = session
        self._plane: Any = SimpleNamespace(
            device=device, passage=Passage(), through=through, wait_for=lambda work: work.synchronize()
        )

    def launch(self, batch: Any) -> Any:
        def again(kept: Any) -> Any:
            with self.forward_stream_ctx:
                return self._forward(kept)

        with overlap.launch(self, again, self._plane) as launched, self.forward_stream_ctx:
            batch.input_ids = self.tokens[batch.req_pool_indices]
            launched.result = launched.begin(self._session, lambda: self._forward(batch, bad=True), batch)
        return launched.result

    def _forward(self, batch: Any, bad: bool = False) -> Any:
        batch.input_ids = self.tokens[batch.req_pool_indices]
        made = torch.full_like(batch.input_ids, -1) if bad else batch.input_ids + 10
        self.tokens[batch.req_pool_indices] = made
        mark = Mark()
        if not self._samples_later:
            mark.record()
        return SimpleNamespace(
            next_token_ids=made, copy_done=mark, delay_sample_func=print if self._samples_later else None
        )

    def _apply_war_barrier(self) -> None:
        self.barriers += 1


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_newest", None)


def test_two_steps_are_run_again_from_the_tokens_that_the_first_began_with() -> None:
    session = Session()
    scheduler = Scheduler([0, 1, 2, 3], session)
    first, second = scheduler.launch(decode([1, 3])), scheduler.launch(decode([1, 2, 3]))
    assert scheduler.tokens.tensor.tolist() == [0, -1, -1, -1]
    for again in session.again:
        again()
    assert first.next_token_ids.tolist() == [11, 13]
    assert second.next_token_ids.tolist() == [21, 12, 23]
    assert scheduler.tokens.tensor.tolist() == [0, 21, 12, 23]


def test_a_step_that_is_run_again_while_it_begins_leaves_the_scheduler_on_its_own_stream() -> None:
    scheduler = Scheduler([0, 1, 2, 3], Session(at_once=True))
    assert scheduler.launch(decode([1, 3])).next_token_ids.tolist() == [11, 13]
    assert scheduler.device_module.current == "schedule"


def test_what_the_scheduler_does_next_waits_for_what_a_step_that_is_run_again_reads() -> None:
    """Else SGLang would take the event of that step for that of the step after it."""
    session = Session()
    scheduler = Scheduler([0, 1, 2, 3], session)
    scheduler.launch(decode([1, 3]))
    session.again[0]()
    assert scheduler.barriers == 1


def test_a_step_is_over_where_the_scheduler_has_marked_its_end() -> None:
    session = Session()
    result = Scheduler([0, 1], session, device="cuda").launch(decode([1]))
    end = result.copy_done
    session.waits[0]()
    assert end.waited_for
    assert result.copy_done is None, "the scheduler would wait for it once more"
    session.waits[0]()  # as when a step before it is bad


def test_a_step_whose_tokens_are_sampled_later_has_a_mark_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Mark] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: marks.append(Mark()) or marks[0])
    session = Session()
    result = Scheduler([0, 1], session, device="cuda", samples_later=True).launch(decode([1]))
    session.waits[0]()
    assert marks[0].waited_for
    assert not result.copy_done.waited_for


def ended(tokens: list[int]) -> SimpleNamespace:
    """A request with a prompt of two tokens that has ended. The step after its last has been launched."""
    return SimpleNamespace(origin_input_ids=[1, 2], output_ids=tokens, session=None, skip_radix_cache_insert=False)


def key(request: SimpleNamespace, owned: int) -> list[int] | None:
    """The tokens under which SGLang puts a request into the prefix cache. ``owned`` places of its row are written, or will
    be by a step that is launched."""
    if request.skip_radix_cache_insert:
        return None
    return [*request.origin_input_ids, *request.output_ids][:owned]


def test_what_an_unjudged_step_writes_goes_under_a_token_that_no_request_has() -> None:
    request = ended([7, 8, 9])
    assert overlap.release(key, request, owned=5) == [1, 2, 7, 8, overlap.UNUSED_TOKEN]
    assert request.output_ids == [7, 8, 9], "which are still to be sent"


def test_what_good_steps_have_written_is_kept_as_it_is() -> None:
    assert overlap.release(key, ended([7, 8, 9]), owned=4) == [1, 2, 7, 8]


def test_a_request_that_was_given_up_within_its_prompt_leaves_nothing() -> None:
    assert overlap.release(key, ended([]), owned=2) is None


def test_tokens_are_as_they_were_when_giving_back_has_failed() -> None:
    def fails(request: Any) -> None:
        raise RuntimeError("no")

    request = ended([7])
    with pytest.raises(RuntimeError):
        overlap.release(fails, request)
    assert request.output_ids == [7]


def test_the_tokens_of_a_session_are_left_alone() -> None:
    request = ended([7])
    request.session = object()
    assert overlap.release(key, request, owned=3) == [1, 2, 7]
