"""Answers held against those without a fault."""

from __future__ import annotations

from typing import Any

import pytest

from eep.drill.query_answers import Answer, _add_native, _add_openai, _add_whole, difference, first_difference


def answer(**given: Any) -> Answer:
    return Answer(
        0, 0.0, **{"tokens": [1, 2, 3], "text": "abc", "usage": (5, 3), "finish": '{"type": "length"}', **given}
    )


def test_the_same_answer_is_right() -> None:
    assert difference(answer(), answer()) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": [1, 9, 3]}, "tokens: 3 of 3, from 1 on [9, 3]"),
        ({"tokens": [1, 2]}, "tokens: 2 of 3, from 2 on []"),
        ({"text": "abd"}, "text: 3 of 3, from 2 on 'd'"),
        ({"usage": (5, 4)}, "usage: (5, 4), should be (5, 3)"),
        ({"finish": '{"type": "stop"}'}, "finish: "),
        ({"logprobs": [(-0.5, 1)]}, "log-probabilities of other tokens"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    assert difference(answer(), answer(**given)).startswith(said)


def test_log_probabilities_may_differ_by_what_float32_differs_by() -> None:
    wanted = answer(logprobs=[(-0.5, 1), (-0.25, 2)])
    assert difference(wanted, answer(logprobs=[(-0.5001, 1), (-0.25, 2)])) == ""
    assert difference(wanted, answer(logprobs=[(-0.51, 1), (-0.25, 2)])) == "log-probabilities differ by 0.0100"


def test_of_an_answer_that_was_cut_the_beginning_counts() -> None:
    assert difference(answer(), answer(tokens=[1, 2], text="", usage=(0, 0), finish="", is_cut=True)) == ""
    assert difference(answer(), answer(tokens=[1, 7], is_cut=True)) != ""


def test_the_place_of_the_first_wrong_token() -> None:
    assert first_difference(answer(), answer(tokens=[1, 2, 4])) == 2
    assert first_difference(answer(), answer(tokens=[1, 2])) is None


def chunk(ids: list[int], text: str, total: int) -> dict[str, Any]:
    meta = {"prompt_tokens": 5, "completion_tokens": total, "finish_reason": None}
    return {"output_ids": ids, "text": text, "meta_info": meta}


def test_a_stream_that_repeats_and_one_that_adds_come_to_the_same() -> None:
    whole, added = Answer(0, 0.0), Answer(0, 0.0)
    for part in (chunk([1], "a", 1), chunk([1, 2], "ab", 2), chunk([1, 2, 3], "abc", 3)):
        _add_native(whole, part)
    for part in (chunk([1], "a", 1), chunk([2], "b", 2), chunk([3], "c", 3)):
        _add_native(added, part)
    assert (
        (whole.tokens, whole.text, whole.usage) == (added.tokens, added.text, added.usage) == ([1, 2, 3], "abc", (5, 3))
    )


def test_a_stream_that_takes_tokens_back_is_refused() -> None:
    got = Answer(0, 0.0)
    _add_native(got, chunk([1, 2], "ab", 2))
    with pytest.raises(ValueError, match="took back tokens"):
        _add_native(got, chunk([1, 9, 3], "axc", 3))


def test_a_stream_whose_count_is_off_is_refused() -> None:
    with pytest.raises(ValueError, match="the server counts 3 tokens and has sent 2"):
        _add_native(Answer(0, 0.0), chunk([1, 2], "ab", 3))


def test_parts_of_a_batch_are_kept_apart() -> None:
    got = Answer(0, 0.0)
    _add_whole(got, [chunk([1], "a", 1), chunk([2, 3], "bc", 2)])
    assert (got.tokens, got.text, got.usage) == ([1, -1, 2, 3, -1], "a\nbc\n", (10, 3))


def test_text_of_either_endpoint_adds_up() -> None:
    got = Answer(0, 0.0)
    _add_openai(got, {"choices": [{"text": "a", "finish_reason": None}]})
    _add_openai(got, {"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]})
    _add_openai(got, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}})
    assert (got.text, got.finish, got.usage) == ("ab", '"length"', (2, 2))
