"""No request that a client can send ends a rank, and none is left without an answer."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.drills import wait_for
from tests.sglang.request_fuzzer import FuzzedRequest, requests

pytestmark = pytest.mark.timeout(900)

RANKS = 4
SEED = 1
COUNT = 300
CLIENTS = 8
ANSWERS_WITHIN = 120.0
SLOW_AT_FIRST = (
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 1},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "logit_bias": {"1": 1.0}, "json_schema": '{"type": "object"}'},
)
"""What torch compiles when a rank is first asked for it. On two cores that takes longer than peers wait."""


def answer_to(server: Server, request: FuzzedRequest) -> tuple[int | str, bytes]:
    """The status and the body of the answer, or what went wrong instead."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWERS_WITHIN)
    try:
        connection.request("POST", request.path, request.body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}", b""
    finally:
        connection.close()


def send_all(server: Server, sent: Iterable[FuzzedRequest]) -> Counter[int | str]:
    """How often each status was answered."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return Counter(status for status, _ in clients.map(lambda request: answer_to(server, request), sent))


def lives_of_all(server: Server) -> dict[int, int]:
    """The incarnation of each rank, when all of them are in."""
    assert server.directory is not None
    target = Target(server.directory)
    wait_for(lambda: sum(rank.is_in for rank in target.ranks().values()) == RANKS, "all ranks are in")
    return {number: rank.incarnation for number, rank in target.ranks().items()}


def asked_of_each_rank() -> list[FuzzedRequest]:
    return [
        FuzzedRequest(
            "/generate",
            json.dumps(
                {"text": "Say", "sampling_params": {"max_new_tokens": 3, **each}, "routed_dp_rank": rank}
            ).encode(),
        )
        for rank in range(RANKS)
        for each in SLOW_AT_FIRST
    ]


def test_no_request_ends_a_rank(plain: Server) -> None:
    assert send_all(plain, asked_of_each_rank()) == {200: RANKS * len(SLOW_AT_FIRST)}
    before = lives_of_all(plain)
    statuses = send_all(plain, requests(SEED, COUNT))
    assert lives_of_all(plain) == before, plain.log[-6000:]
    assert set(statuses) <= {200, 400, 404, 500}, statuses
    assert statuses[200] >= COUNT // 10, f"too few of the requests came to a rank: {statuses}"
    assert statuses[400] >= COUNT // 10, f"too few of the requests were wrong: {statuses}"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [10**9]}, "input_ids"),
        ("/generate", {"input_ids": [[1, 2], [3, -1]]}, "input_ids"),
        ("/generate", {"input_ids": [[]]}, "input_ids"),
        ("/v1/completions", {"model": "default", "prompt": [10**9]}, "input_ids"),
        ("/v1/completions", {"model": "default", "prompt": "Say", "logprobs": 10**6}, "top_logprobs_num"),
        ("/generate", {"text": "Say", "return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
        ("/generate", {"text": "Say", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ("/generate", {"text": "Say", "return_logprob": True, "logprob_start_len": -7}, "logprob_start_len"),
        ("/generate", {"text": "Say", "sampling_params": {"top_k": 2**40}}, "top_k"),
        (
            "/generate",
            {"text": "Say", "sampling_params": {"min_new_tokens": 2, "stop_token_ids": [10**6]}},
            "stop_token_ids",
        ),
        ("/generate", {"input_embeds": [[0.5] * 3]}, "input_embeds"),
        ("/generate", {"text": "Say", "sampling_params": {"n": 10**9}}, "n must be"),
        ("/generate", {"text": "Say", "sampling_params": {"n": None}}, "n must be"),
        ("/generate", {"text": "Say", "sampling_params": {"temperature": "hot"}}, "temperature must be a number"),
        ("/generate", {"text": ["Say", "it"], "sampling_params": [{}, {"stop": 5}]}, "stop must be"),
        ("/generate", {"text": "Say", "sampling_params": {"nonsense": 1}}, "no field 'nonsense'"),
        (
            "/generate",
            {"text": "Say", "sampling_params": {"stop_regex_strs": ["(a+)+$"]}},
            "no field 'stop_regex_strs'",
        ),
        ("/generate", {"text": "Say", "sampling_params": {"stop_regex": "(a|a)+$"}}, "stop_regex must not repeat"),
        ("/v1/completions", {"model": "default", "prompt": "Say", "stop_regex": "(a|a){30}$"}, "stop_regex must not"),
        ("/generate", {"text": "Say", "session_params": {"offset": "x"}}, "session_params"),
    ],
)
def test_a_number_that_no_rank_can_take_is_named(plain: Server, path: str, body: dict[str, object], field: str) -> None:
    before = lives_of_all(plain)
    status, said = answer_to(plain, FuzzedRequest(path, json.dumps(body).encode()))
    assert (status, field in said.decode()) == (400, True), said
    assert lives_of_all(plain) == before
