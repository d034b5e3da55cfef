"""How long a rank waits for a peer: longer in a step that prefills, and never past what counts as a stall."""

from __future__ import annotations

import pytest

from sglang_patches.rank.patience import StepPatience, between_steps_ms


def decoding(timeout_ms: float = 1000.0, stall_timeout_s: float = 60.0) -> StepPatience:
    """After steps in which no rank prefills."""
    patience = StepPatience(timeout_ms, stall_timeout_s)
    patience.begin(prefills=False, tokens=8)
    patience.begin(prefills=False, tokens=8)
    return patience


def test_between_steps_a_rank_waits_at_least_for_a_while() -> None:
    assert between_steps_ms(1000.0) == 10_000.0
    assert between_steps_ms(20_000.0) == 20_000.0


def test_where_no_rank_prefills_a_rank_waits_for_as_long_as_it_was_told() -> None:
    assert (decoding().within_step_ms, decoding().between_steps_ms) == (1000.0, 10_000.0)


@pytest.mark.parametrize(
    ("timeout_ms", "stall_timeout_s", "milliseconds"),
    [(1000.0, 60.0, 30_000.0), (1000.0, 20.0, 10_000.0), (50_000.0, 60.0, 50_000.0), (5000.0, 0.0, 150_000.0)],
    ids=["by default", "half the time of a stall", "never less than it was told", "without a limit for stalls"],
)
def test_where_a_rank_prefills_all_wait_longer(timeout_ms: float, stall_timeout_s: float, milliseconds: float) -> None:
    patience = decoding(timeout_ms, stall_timeout_s)
    patience.begin(prefills=True, tokens=8)
    assert patience.within_step_ms == patience.between_steps_ms == milliseconds


def test_a_rank_allows_for_the_step_before_which_may_run_again() -> None:
    patience = decoding()
    waits = []
    for prefills in (True, False, False):
        patience.begin(prefills, tokens=8)
        waits.append(patience.within_step_ms)
    assert waits == [30_000.0, 30_000.0, 1000.0]


def test_a_rank_that_has_just_joined_allows_for_a_step_of_which_it_was_not_told() -> None:
    assert StepPatience(1000.0, 60.0).within_step_ms == 30_000.0


def test_a_rank_has_no_reason_to_compute_for_long_where_prompts_are_short() -> None:
    patience = decoding()
    assert not patience.for_long_work
    for tokens, is_long in ((64, False), (65, True), (1, True), (1, False)):
        patience.begin(prefills=True, tokens=tokens)
        assert patience.for_long_work == is_long
    patience.begin(prefills=False, tokens=1000)
    assert not patience.for_long_work, "a step that only decodes has no long layer"
    assert StepPatience(1000.0, 60.0).for_long_work, "what a rank that has just joined was not told of"
