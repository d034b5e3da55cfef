"""What a drill asks for, decided by a seed."""

from __future__ import annotations

import json

import pytest

from eep.drill.request_mix import REQUEST_MIXES, RequestMix, make_queries, with_stop_strings

KINDS = {"greedy", "seeded", "penalty", "logprob", "whole", "batch", "completion", "chat"}


@pytest.mark.parametrize("device", sorted(REQUEST_MIXES))
def test_a_mix_has_every_kind_of_request(device: str) -> None:
    assert {query.kind for query in make_queries(REQUEST_MIXES[device], 1)} == KINDS


def test_the_same_seed_gives_the_same_requests() -> None:
    first, again, other = (make_queries(RequestMix(), seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_prompts_and_answers_have_the_lengths_that_were_asked_for() -> None:
    mix = RequestMix(greedy=200, prompts=((1.0, 10, 20),), shared=(50,), with_shared=0.5, answers=(4, 40))
    queries = [query for query in make_queries(mix, 1) if query.is_greedy]
    lengths = [len(query.prompt) for query in queries]
    assert all(10 <= length <= 20 or 51 <= length <= 130 for length in lengths)
    assert any(length > 50 for length in lengths)
    assert any(length <= 20 for length in lengths)
    assert all(4 <= query.tokens <= 40 for query in queries)


def test_the_mix_of_a_gpu_has_prompts_of_several_chunks() -> None:
    long = [query for query in make_queries(REQUEST_MIXES["cuda"], 1) if len(query.prompt) > 1000]
    assert len(long) >= 5


def test_prompts_share_beginnings() -> None:
    prompts = [query.prompt for query in make_queries(RequestMix(greedy=100), 1) if query.is_greedy]
    beginnings = {prompt[:90] for prompt in prompts if len(prompt) > 90}
    assert len(beginnings) < sum(len(prompt) > 90 for prompt in prompts)


def test_requests_are_numbered_and_can_be_sent() -> None:
    queries = make_queries(RequestMix(), 1)
    assert [query.number for query in queries] == list(range(len(queries)))
    for query in queries:
        assert json.loads(json.dumps(query.body)) == query.body


def test_a_stop_string_stands_in_the_answer_for_the_first_time() -> None:
    queries = make_queries(RequestMix(greedy=4), 1)
    texts = ["abcdefghijklmnopqrstuvwxyz" for _ in queries]
    made = with_stop_strings(queries, texts)
    assert [query.kind for query in made] == ["stop"] * 3
    assert [query.number for query in made] == [len(queries) + each for each in range(3)]
    for query in made:
        stop = query.body["sampling_params"]["stop"]
        assert texts[0].index(stop) >= len(texts[0]) // 2
    assert "stop" not in queries[0].body["sampling_params"]


def test_an_answer_that_repeats_itself_gives_no_stop_string() -> None:
    queries = make_queries(RequestMix(greedy=2), 1)
    assert with_stop_strings(queries, ["aaaaaaaaaaaaaaaa" for _ in queries]) == []


def test_the_prompts_of_a_gpu_are_more_than_a_rank_can_cache() -> None:
    """A rank of the drill caches 40,960 tokens. With fewer prompts the ranks hardly prefill."""
    prompts = {query.prompt for query in make_queries(REQUEST_MIXES["cuda"], 1) if query.kind in ("greedy", "seeded")}
    assert sum(map(len, prompts)) > 1.5 * 40_960
