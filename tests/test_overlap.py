"""Overlap scheduling: what is on the device is read and written on one stream only. The scheduler is made up; that tokens
come out right, tests/sglang shows with the real one, on a CPU, where there are no streams to get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang_patches.hooks", reason="the rest of the SGLang plugin is not here")

from sglang_patches import overlap


class ForwardStream:
    """A context that knows whether one is in it."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class OnOneStream:
    """Tokens that may be touched within that context only."""

    def __init__(self, tokens: list[int], stream: ForwardStream) -> None:
        self.tensor, self._stream = torch.tensor(tokens), stream

    def __getitem__(self, at: Any) -> torch.Tensor:
        assert self._stream.depth, "read on another stream"
        return self.tensor[at]

    def __setitem__(self, at: Any, value: torch.Tensor) -> None:
        assert self._stream.depth, "written on another stream"
        self.tensor[at] = value


class Session:
    """Starts steps, and has them run again when it is told to."""

    def __init__(self) -> None:
        self.again: list[Any] = []

    def begin(self, start: Any, using: int, *, again: Any, wait: Any, ahead: int) -> Any:
        self.again.append(again)
        return start()


@contextmanager
def through(_: int) -> Iterator[None]:
    yield


def decode(rows: list[int]) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        req_pool_indices=torch.tensor(rows),
        input_ids=None,
        sampling_info=None,
    )


def test_two_steps_are_run_again_from_the_tokens_that_the_first_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step adds 10 to the newest token of each of its requests; a bad one makes it -1."""
    monkeypatch.setattr(overlap, "_newest", None)
    stream, session = ForwardStream(), Session()
    tokens = OnOneStream([0, 1, 2, 3], stream)
    scheduler: Any = SimpleNamespace(forward_stream_ctx=stream, future_map=SimpleNamespace(output_tokens_buf=tokens))
    here: Any = SimpleNamespace(device="cpu", using=0, session=session, through=through)

    def run_batch(batch: Any, bad: bool = False) -> Any:
        with stream:
            batch.input_ids = tokens[batch.req_pool_indices]
            made = torch.full_like(batch.input_ids, -1) if bad else batch.input_ids + 10
            tokens[batch.req_pool_indices] = made
        return SimpleNamespace(next_token_ids=made, delay_sample_func=None)

    def launch(batch: Any) -> Any:
        with overlap.launch(scheduler, run_batch) as launched:
            with stream:
                batch.input_ids = tokens[batch.req_pool_indices]
            launched.result = launched.begin(here, lambda: run_batch(batch, bad=True), batch)
        return launched.result

    first, second = launch(decode([1, 3])), launch(decode([1, 2, 3]))
    assert tokens.tensor.tolist() == [0, -1, -1, -1]
    for again in session.again:
        again()
    assert first.next_token_ids.tolist() == [11, 13]
    assert second.next_token_ids.tolist() == [21, 12, 23]
    assert tokens.tensor.tolist() == [0, 21, 12, 23]
