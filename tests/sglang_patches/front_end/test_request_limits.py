"""Numbers of a request that a rank would index by: what is let through does no harm, and what is not is named."""

from __future__ import annotations

import dataclasses
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.front_end.request_limits import (
    INT32,
    INT64,
    MOST_PROMPT_LOGPROBS,
    RequestLimits,
    check_ranges,
)
from tests.sglang_patches.front_end.front_end_server import Server, TokenizedGenerateReqInput

LIMITS = RequestLimits(vocabulary=100, hidden=4, context=64)
OF_PARAMETERS = (
    *("top_k", "min_new_tokens", "max_new_tokens", "stop_token_ids", "logit_bias", "sampling_seed", "temperature"),
    *("beam_width", "stream_interval"),
)


def request(**fields: Any) -> Any:
    """A tokenized request with a prompt of three tokens. Names of sampling parameters go where they belong."""
    parameters = {name: fields.pop(name) for name in OF_PARAMETERS if name in fields}
    given = {"input_ids": array("q", [1, 2, 3]), "sampling_params": SimpleNamespace(**parameters), **fields}
    return SimpleNamespace(**given)


def fault(**fields: Any) -> str | None:
    try:
        check_ranges(request(**fields), LIMITS)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", array("q", [1, 10**9])),
        ("input_ids", array("q", [1, -1])),
        ("input_ids", [100]),
        ("input_ids", array("q")),
        ("top_logprobs_num", 10**9),
        ("top_logprobs_num", -1),
        ("token_ids_logprob", [5, 100]),
        ("token_ids_logprob", [-1]),
        ("logprob_start_len", 4),
        ("logprob_start_len", -2),
        ("top_k", 2**40),
        ("top_k", -2),
        ("min_new_tokens", 65),
        ("max_new_tokens", 2**31),
        ("stop_token_ids", {3, 10**9}),
        ("stop_token_ids", {-1}),
        ("logit_bias", {"100": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"abc": 1.0}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": 1e39}),
        ("sampling_seed", 2**63),
        ("sampling_seed", -(2**63) - 1),
        ("temperature", float("inf")),
        ("beam_width", 0),
        ("beam_width", 10**6),
        ("stream_interval", -1),
        ("input_embeds", [[0.0] * 3]),
        ("input_embeds", [[0.0] * 4, [0.0] * 3]),
        ("input_embeds", [[[0.0] * 4]]),
        ("input_embeds", [[0.0, 0.0, 0.0, 1e39]]),
        ("input_embeds", [["a"] * 4]),
        ("input_embeds", []),
        ("multi_item_delimiter_indices", [0, 3]),
        ("token_indices_to_pool", [-1]),
        ("positional_embed_overrides", SimpleNamespace(positions=[3])),
        ("routed_experts_start_len", 4),
        ("routed_experts_start_len", -1),
        ("lora_id", "mine"),
    ],
)
def test_what_is_out_of_range_is_named(field: str, value: Any) -> None:
    found = fault(**{field: value})
    assert found is not None
    assert found.startswith(field)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input_ids": array("q", [0, 99])},
        {"input_ids": None},
        {"input_ids": array("q"), "input_embeds": [[0.5] * 4]},
        {"input_ids": None, "input_embeds": [[0.5] * 4], "logprob_start_len": 1},
        {"top_k": -1, "top_logprobs_num": 100, "token_ids_logprob": [0, 99], "logprob_start_len": -1},
        {"top_k": INT32, "logprob_start_len": 3, "return_logprob": True},
        {"session_params": object(), "logprob_start_len": 64},
        {"min_new_tokens": 64, "max_new_tokens": None, "stop_token_ids": {0, 99}, "stream_interval": 0},
        {"logit_bias": {"0": -100.0, "99": 100.0}, "sampling_seed": INT64, "temperature": 0.0, "beam_width": None},
        {"sampling_seed": -INT64 - 1, "multi_item_delimiter_indices": [0, 2], "token_indices_to_pool": []},
    ],
)
def test_what_is_in_range_is_let_through(fields: dict[str, Any]) -> None:
    assert fault(**fields) is None


def test_no_prompt_has_more_log_probabilities_than_a_rank_can_bear() -> None:
    long = RequestLimits(2**18, 4, 2**18)
    many = request(input_ids=array("q", [1] * 128), top_logprobs_num=2**18, logprob_start_len=0, return_logprob=True)
    assert MOST_PROMPT_LOGPROBS < 128 * 2**18
    with pytest.raises(ValueError, match=r"top_logprobs_num asks for 262144 .* of 128 tokens"):
        check_ranges(many, long)
    many.logprob_start_len = 64
    check_ranges(many, long)


numbers = st.one_of(st.integers(-3, 103), st.integers(-(2**64), 2**64))
lists = st.lists(numbers, max_size=5)


@given(
    tokens=lists,
    count=numbers,
    start=numbers,
    wanted=lists,
    top_k=numbers,
    stops=lists,
    least=numbers,
    seed=numbers,
    bias=st.dictionaries(numbers.map(str), st.floats(), max_size=3),
    places=lists,
)
def test_a_request_that_is_let_through_can_be_indexed_by(
    tokens: list[int],
    count: int,
    start: int,
    wanted: list[int],
    top_k: int,
    stops: list[int],
    least: int,
    seed: int,
    bias: dict[str, float],
    places: list[int],
) -> None:
    asked = request(
        input_ids=tokens,
        top_logprobs_num=count,
        logprob_start_len=start,
        token_ids_logprob=wanted,
        top_k=top_k,
        stop_token_ids=set(stops),
        min_new_tokens=least,
        sampling_seed=seed,
        logit_bias=bias,
        token_indices_to_pool=places,
    )
    try:
        check_ranges(asked, LIMITS)
    except ValueError:
        return
    logits, embeddings = np.zeros(LIMITS.vocabulary, np.float32), np.zeros((LIMITS.vocabulary, LIMITS.hidden))
    assert tokens, "a rank cannot run a step on nothing"
    embeddings[np.array(tokens, np.int64)]
    np.array(tokens, np.int64)[np.array(places, np.int64)]
    np.partition(logits, -max(count, 1))
    logits[np.array(wanted + list(stops), np.int64)] = -np.inf
    for token, value in bias.items():
        logits[int(token)] = value
    assert not np.isnan(logits).any()
    assert start == -1 or 0 <= start <= len(tokens)
    assert all(each >= 0 for each in (*tokens, *wanted, *stops, *places, count)), "an index from the end is none"
    np.array([top_k, least], np.int32)
    np.array([seed], np.int64)


def test_the_front_end_sends_nothing_of_a_request_that_is_out_of_range() -> None:
    server = Server(limits=LIMITS)
    server.view(1, r0=0)
    with pytest.raises(ValueError, match="input_ids must hold tokens from 0 to 99, and holds 1000000000"):
        server.accept("bad", input_ids=array("q", [10**9]))
    assert (server.sent, len(server.front_end.ledger)) == ([], 0)
    server.front_end.send(dataclasses.replace(TokenizedGenerateReqInput("good")))
    assert [message.rid for message in server.sent] == ["good"]
