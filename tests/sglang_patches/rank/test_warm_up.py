"""The requests with which a rank warms up. tests/sglang/test_scale.py shows that ranks serve them."""

from __future__ import annotations

import time

import pytest

from sglang_patches.rank.warm_up import WarmUp, choose_prompts


def test_a_round_begins_when_the_last_is_over() -> None:
    warm_up = WarmUp([(1,), (2, 3)], lambda number, length: (number, length), until=time.monotonic() + 60)
    assert warm_up.receive() == [(0, 1)]
    assert warm_up.receive() == []
    warm_up.finished(["eep-warm-up-0"])
    assert warm_up.receive() == [(1, 2), (2, 3)]
    warm_up.finished(["eep-warm-up-2"])
    assert warm_up.receive() == []
    warm_up.finished(["eep-warm-up-1", "eep-warm-up-2"])
    assert not warm_up.is_over, "a step may be under way still"
    assert (warm_up.receive(), warm_up.is_over) == ([], False)
    assert (warm_up.receive(), warm_up.is_over) == ([], True)


def test_it_does_not_wait_for_ever() -> None:
    warm_up = WarmUp([(1,)], lambda number, length: (number, length), until=time.monotonic() + 60)
    warm_up.receive()
    warm_up.until = time.monotonic() - 1
    with pytest.raises(RuntimeError, match="eep-warm-up-0"):
        warm_up.receive()


@pytest.mark.parametrize("chunk", [1, 16, 128, 8192])
def test_no_round_is_more_than_is_prefilled_at_once_and_one_token(chunk: int) -> None:
    rounds = choose_prompts(chunk)
    assert max(map(sum, rounds)) == chunk + 1
    assert all(length >= 1 for lengths in rounds for length in lengths)


def test_more_rows_than_a_graph_has_decode_in_the_warm_up() -> None:
    """A kernel that is loaded in the middle of a step may wait for kernels that wait for this rank."""
    rounds = choose_prompts(512, in_graphs=32, running=100)
    assert [len(lengths) for lengths in rounds if len(lengths) > 32] == [33, 48, 64, 96]
    assert all(max(map(len, choose_prompts(512, 32, running))) < 33 for running in (0, 16, 32))


def test_prompts_of_all_sizes_are_prefilled() -> None:
    sizes = {sum(lengths) for lengths in choose_prompts(512)}
    assert {96, 128, 192, 256, 384, 512, 513} <= sizes
