"""Requests at random, most of them wrong somewhere. The same seed makes the same requests.

Each begins as one that a server can answer. Then a few of its fields get values that a client might send by mistake or to do
harm: numbers out of any range, other types, lists within lists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

INTEGERS = (
    *(-1, 0, 1, -2, 2, 7, 255, 511, 512, 10**6, 10**9, -(10**9)),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**63 - 1, -(2**63), 2**63, 2**64),
)
FLOATS = (0.5, -0.5, 1.0, 0.0, 2.0, 1e-9, 1e39, -1e39, 1e308)
OTHERS = (None, True, False, "", "x", "1", "�" * 3, [], {}, [[]], [None], {"a": 1}, [1, "x"], ["x"], [[1, 2], [3]])
GRAMMARS: dict[str, tuple[Any, ...]] = {
    "json_schema": ('{"type": "object"}', "{", '{"type": "nothing"}', '{"$ref": "#"}', "$$ANY$$"),
    "regex": ("[a-z]{1,3}", "(", "a{1000000}", "(a*)*b"),
    "ebnf": ('root ::= "a"', "root ::= root", "x"),
    "structural_tag": ("{}", '{"structures": [], "triggers": []}', "x"),
}
IN_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
IN_INTEGERS = (
    *("max_new_tokens", "top_k", "n", "min_new_tokens", "beam_width", "stream_interval", "sampling_seed", "priority"),
    *("logprob_start_len", "top_logprobs_num", "routed_experts_start_len", "routed_dp_rank", "data_parallel_rank"),
    *("bootstrap_room", "bootstrap_port", "disagg_prefill_dp_rank", "max_thinking_tokens", "decode_tp_size", "seed"),
    *("max_tokens", "logprobs", "top_logprobs", "best_of", "min_tokens", "dimensions", "capacity_of_str_len"),
)
IN_LISTS = (
    *("stop_token_ids", "input_ids", "token_ids_logprob", "multi_item_delimiter_indices", "token_indices_to_pool"),
    *("prompt", "tokens", "label_token_ids", "return_hidden_states"),
)
IN_FLAGS = (
    *(
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "return_logprob",
        "return_text_in_logprobs",
        "stream",
        "echo",
    ),
    *("return_sampling_mask", "return_flat_raw_top_logprobs", "return_routed_experts", "return_indexer_topk"),
    *("require_reasoning", "return_bytes", "return_entropy", "return_prompt_token_ids", "need_wait_for_mm_inputs"),
    *("background", "apply_softmax", "item_first", "streaming"),
)
IN_TEXTS = (
    *("text", "rid", "lora_path", "lora_id", "session_id", "routing_key", "extra_key", "cache_salt", "http_worker_ipc"),
    *("bootstrap_host", "stop", "stop_regex", "suffix", "user", "query"),
)
PARAMETERS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "beam_width", "ignore_eos"),
    *("skip_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params"),
)
# Without custom_logit_processor, which is code of the client's and may do anything.
FIELDS = (
    *("input_ids", "input_embeds", "text", "image_data", "audio_data", "return_logprob", "logprob_start_len", "rid"),
    *(
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "return_sampling_mask",
        "lora_path",
        "lora_id",
    ),
    *("sampling_logprobs_mode", "return_flat_raw_top_logprobs", "return_hidden_states", "return_routed_experts"),
    *("routed_experts_start_len", "return_indexer_topk", "session_params", "session_id"),
    *("positional_embed_overrides", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "priority"),
    *("data_parallel_rank", "disagg_prefill_dp_rank", "routing_key", "require_reasoning", "max_thinking_tokens"),
    *("extra_key", "return_bytes", "return_entropy", "return_prompt_token_ids", "need_wait_for_mm_inputs", "stream"),
    *("num_items_assigned", "encoder_urls", "multi_item_delimiter_indices", "token_indices_to_pool", "cache_salt"),
    *("kv_hints", "background", "modalities", "http_worker_ipc", "custom_labels", "received_time", "decode_tp_size"),
)
OF_OPENAI = (
    *("prompt", "messages", "max_tokens", "logprobs", "top_logprobs", "echo", "n", "best_of", "stop", "stop_token_ids"),
    *(
        "logit_bias",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "frequency_penalty",
        "stream",
        "user",
    ),
    *(
        "presence_penalty",
        "repetition_penalty",
        "regex",
        "ebnf",
        "json_schema",
        "response_format",
        "tools",
        "tool_choice",
    ),
    *(
        "ignore_eos",
        "session_params",
        "lora_path",
        "rid",
        "priority",
        "return_hidden_states",
        "custom_params",
        "suffix",
    ),
)


@dataclass(frozen=True)
class FuzzedRequest:
    path: str
    body: bytes


def requests(seed: int, count: int) -> Iterator[FuzzedRequest]:
    choose = random.Random(seed)
    for _ in range(count):
        make = choose.choices((_generate, _openai, _other, _garbage), (10, 5, 2, 1))[0]
        yield make(choose)


def _value(choose: random.Random, name: str) -> Any:
    """For a field of that name: mostly of its type, so that it gets far."""
    if choose.random() < 0.15:
        return choose.choice((*INTEGERS, *FLOATS, *OTHERS))
    if name in IN_FLOATS:
        return choose.choice(FLOATS)
    if name in ("max_new_tokens", "max_tokens"):
        return choose.choice([each for each in INTEGERS if each < 10 or each > 1000])  # answers that take no time
    if name in IN_INTEGERS:
        return choose.choice(INTEGERS)
    if name in IN_FLAGS:
        return choose.choice((True, False))
    if name in IN_TEXTS:
        return choose.choice(("", "x", "Say it", "~1", "(", ["x", "y"], "x" * 500))
    if name == "logit_bias":
        return {str(choose.choice(INTEGERS)): choose.choice(FLOATS) for _ in range(choose.randrange(1, 3))}
    if name == "session_params":
        return {
            choose.choice(("id", "rid", "offset", "replace", "drop_previous_output")): choose.choice(INTEGERS + OTHERS)
        }
    if name == "input_embeds":
        return [[0.5] * choose.choice((1, 63, 64, 128)) for _ in range(choose.randrange(1, 4))]
    few = [choose.choice(INTEGERS) for _ in range(choose.randrange(1, 4))]
    return few if name in IN_LISTS and choose.random() < 0.8 else choose.choice((few, [few, few], *OTHERS))


def _generate(choose: random.Random) -> FuzzedRequest:
    parameters: dict[str, Any] = {"temperature": choose.choice((0, 1)), "max_new_tokens": choose.randrange(1, 4)}
    body: dict[str, Any] = {"text": "Say", "sampling_params": parameters}
    for name in choose.sample(PARAMETERS, choose.randrange(0, 2)):
        parameters[name] = _value(choose, name)
    if choose.random() < 0.1:
        name = choose.choice(list(GRAMMARS))
        parameters[name] = choose.choice(GRAMMARS[name])
    if choose.random() < 0.4:
        body["return_logprob"] = True
    for name in choose.sample(FIELDS, choose.randrange(0, 2)):
        body[name] = _value(choose, name)
        if name in ("input_ids", "input_embeds"):
            body.pop("text", None)
    return FuzzedRequest("/generate", _json(body))


def _openai(choose: random.Random) -> FuzzedRequest:
    path = choose.choice(("/v1/completions", "/v1/chat/completions"))
    body: dict[str, Any] = {"model": "default", "max_tokens": choose.randrange(1, 4)}
    body["prompt" if path == "/v1/completions" else "messages"] = (
        choose.choice(("Say", [1, 2], [[1], [2, 3]], ["Say", "it"]))
        if path == "/v1/completions"
        else [{"role": "user", "content": "Say"}]
    )
    for name in choose.sample(OF_OPENAI, choose.randrange(1, 3)):
        body[name] = _value(choose, name)
    return FuzzedRequest(path, _json(body))


def _other(choose: random.Random) -> FuzzedRequest:
    """Routes beside those of requests. Those that end all requests, or hold them back, are left out."""
    path, fields = choose.choice(
        (
            ("/open_session", ("capacity_of_str_len", "session_id", "streaming", "timeout")),
            ("/close_session", ("session_id",)),
            ("/tokenize", ("model", "prompt", "add_special_tokens")),
            ("/detokenize", ("model", "tokens", "skip_special_tokens")),
            ("/v1/score", ("query", "items", "label_token_ids", "apply_softmax", "item_first", "model")),
            ("/v1/embeddings", ("model", "input", "dimensions")),
            ("/v1/rerank", ("query", "documents")),
            ("/v1/messages", ("model", "messages", "max_tokens", "top_k", "temperature")),
            ("/v1/responses", ("model", "input", "max_output_tokens", "top_logprobs", "background")),
            ("/api/generate", ("model", "prompt", "options", "stream")),
            ("/encode", ("text", "input_ids", "sampling_params")),
            ("/vertex_generate", ("instances", "parameters")),
            ("/parse_function_call", ("text", "tools", "tool_call_parser")),
            ("/separate_reasoning", ("text", "reasoning_parser")),
            ("/flush_cache", ("timeout",)),
            ("/freeze_gc", ()),
            ("/set_internal_state", ("server_args",)),
            ("/slow_down", ("forward_sleep_time",)),
            ("/dump_expert_distribution_record", ()),
            ("/init_weights_update_group", ("master_address", "master_port", "rank_offset", "world_size")),
            ("/get_weights_by_name", ("name", "truncate_size")),
        )
    )
    return FuzzedRequest(path, _json({name: _value(choose, name) for name in fields if choose.random() < 0.8}))


def _garbage(choose: random.Random) -> FuzzedRequest:
    body = choose.choice((b"", b"{", b"[]", b"null", b"1e999", b"\xff\xfe", b'{"text": NaN}', b"[" * 10_000, b'"x"'))
    return FuzzedRequest(
        choose.choice(("/generate", "/v1/completions", "/v1/chat/completions", "/abort_request")), body
    )


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
