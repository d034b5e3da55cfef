"""How many tokens a step may have, by what SGLang was told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_patches.rank import step_sizes

CAPTURES = SimpleNamespace(backend="full", bs=[1, 2, 4, 8, 12, 16, 24, 32])
CAPTURES_NONE = SimpleNamespace(backend="disabled", bs=[])


def test_a_step_holds_a_chunk_and_every_running_request() -> None:
    assert step_sizes.largest_step(SimpleNamespace(chunked_prefill_size=512, max_running_requests=64)) == 576


@pytest.mark.parametrize("chunk", [None, 0, -1])
def test_chunked_prefill_is_needed(chunk: int | None) -> None:
    with pytest.raises(SystemExit, match="--chunked-prefill-size"):
        step_sizes.largest_step(SimpleNamespace(chunked_prefill_size=chunk, max_running_requests=64))


def test_a_decode_step_may_have_more_rows_than_the_largest_graph() -> None:
    assert step_sizes.largest_graph(CAPTURES) == 32
    assert step_sizes.largest_decode(CAPTURES, running=64) == 64
    assert step_sizes.largest_decode(CAPTURES, running=8) == 32


def test_without_captured_steps_there_is_no_buffer_for_them() -> None:
    assert step_sizes.largest_graph(CAPTURES_NONE) == 0
    assert step_sizes.largest_decode(CAPTURES_NONE, running=64) == 0


def test_a_rank_runs_its_share_of_the_requests() -> None:
    schedule, parallel = SimpleNamespace(max_running_requests=250), SimpleNamespace(tp_size=4)
    assert step_sizes.running_at_once(schedule, parallel) == 63
