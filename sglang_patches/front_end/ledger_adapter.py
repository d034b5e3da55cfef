"""Translates between SGLang's messages and the ledger of requests.

It reads messages by the names of their fields, which are the same in all supported versions. A field that a version does not
have counts as empty.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import Any

import msgspec

from eep.requests.request_records import Counts, Delivery, Replay, ReplayManner, Request
from sglang_patches import addressed_life
from sglang_patches.replayed_fields import DELIVERED, LOST_LIFE
from sglang_patches.sampling.seeds import Seeds

_MORE_THAN_TOKENS = (
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_sampling_mask",
    "input_embeds",
    "positional_embed_overrides",
    "token_indices_to_pool",
)
"""Fields of a request whose answer cannot be continued: its input is not tokens, or its answer holds more per token."""
_PER_TOKEN = (
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
)
_OF_THE_PROMPT = (
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx",
)
_CHECKED_APART = ("input_ids", "input_embeds", "mm_inputs", "time_stats")
"""Fields of a request that are large, or that SGLang wraps: :mod:`.request_limits` looks at the first two."""
UNSEEDED = "it is sampled by kernels that use no seeds (those of --sampling-backend pytorch do)"


def check_types(message: Any) -> None:
    """ValueError if a field of a request, or a sampling parameter, is not of the type that SGLang declares. SGLang itself
    does not check. The process that receives the request would end with an error, and the server with it."""
    parameters = getattr(message, "sampling_params", None)
    if isinstance(parameters, msgspec.Struct):
        _check_fields(parameters, "sampling_params: ", {"custom_params": None})  # of any type: SGLang wraps them
    if isinstance(message, msgspec.Struct):
        left_out: dict[str, Any] = dict.fromkeys(_CHECKED_APART)
        if isinstance(parameters, msgspec.Struct):
            left_out["sampling_params"] = type(parameters)()
        if isinstance(getattr(message, "positional_embed_overrides", None), msgspec.Struct):
            left_out["positional_embed_overrides"] = None
        _check_fields(message, "", left_out)


def _check_fields(value: msgspec.Struct, prefix: str, instead: Mapping[str, Any]) -> None:
    """``instead``: values for fields that are not to be looked at."""
    plain = copy.copy(value)
    for name, other in instead.items():
        if hasattr(plain, name):
            setattr(plain, name, other)
    try:
        _decoder(type(plain)).decode(msgspec.msgpack.encode(plain))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(prefix + _named(plain, str(error))) from None


@cache
def _decoder(kind: type) -> Any:
    return msgspec.msgpack.Decoder(kind)


def _named(value: msgspec.Struct, error: str) -> str:
    """The error with the name of the field in place of its number: ``- at `$[3]```. A tag is number 0."""
    for number, name in enumerate(value.__struct_fields__, start=0 if value.__struct_config__.tag is None else 1):
        error = error.replace(f"`$[{number}]", f"`{name}")
    return error


def request_of(message: Any, deterministic: bool) -> Request:
    """A tokenized request as the ledger knows it: without its prompt, which :func:`kept_copy` has. ``deterministic``:
    sampling goes by seed and position alone."""
    parameters = message.sampling_params
    generates = hasattr(message, "stream")
    restart = (
        not generates
        or (getattr(parameters, "beam_width", None) or 1) > 1
        or any(_is_set(getattr(message, name, None)) for name in _MORE_THAN_TOKENS)
    )
    return Request(
        message.rid,
        parameters.max_new_tokens if generates else None,
        ReplayManner.RESTART if restart else ReplayManner.RESUME,
        UNSEEDED if _is_sampled(message) and not deterministic else "",
        _why_immovable(message),
        len(getattr(message, "input_ids", None) or ()),
    )


def _is_sampled(message: Any) -> bool:
    return hasattr(message, "stream") and getattr(message.sampling_params, "top_k", 1) != 1


def _is_set(value: object) -> bool:
    return value is not None and value is not False


def _why_immovable(message: Any) -> str:
    if getattr(message, "session_params", None) is not None or getattr(message, "session_id", None) is not None:
        return "that rank alone had its session"
    if getattr(message, "mm_inputs", None) is not None:
        return "its images went to that rank and cannot be sent twice"
    return ""


def kept_copy(message: Any, seeds: Seeds | None = None) -> Any:
    """What to keep of a request to be able to send it again. ``seeds``: give it a seed, so that every rank samples it
    alike."""
    kept = copy.copy(message)
    if seeds is not None and _is_sampled(message):
        kept.sampling_params = copy.copy(message.sampling_params)
        kept.sampling_params.sampling_seed = seeds.seed_for(message.sampling_params)
    parameters = getattr(kept, "sampling_params", None)
    given = getattr(parameters, "custom_params", None)
    ours = (DELIVERED, LOST_LIFE)  # only the front end may say these
    if isinstance(given, dict) and any(key in given for key in ours):
        kept.sampling_params = copy.copy(parameters)
        kept.sampling_params.custom_params = {key: value for key, value in given.items() if key not in ours} or None
    return kept


def message_for(kept: Any, replay: Replay, rank: int, life: int) -> Any:
    """The message that makes this life of ``rank`` serve a request, from where it stands."""
    message = copy.copy(kept)
    addressed_life.address(message, life)
    message.rid = replay.wire
    if hasattr(message, "routed_dp_rank"):
        message.routed_dp_rank = rank
    told: dict[str, Any] = {}
    if replay.manner is ReplayManner.RESUME:
        told |= {DELIVERED: list(replay.delivered)} if replay.delivered else {}
        told |= {LOST_LIFE: list(replay.last_life)} if replay.last_life is not None else {}
    if told:
        message.sampling_params = copy.copy(kept.sampling_params)
        message.sampling_params.custom_params = {**(kept.sampling_params.custom_params or {}), **told}
    return message


def rows_of(output: Any) -> Iterator[tuple[str, Sequence[int], Counts, str, bool]]:
    """For each request in an output: its wire id, tokens, counts, text, and whether it is finished. Every token of a server
    passes here. ValueError if the lists of the output differ in length."""
    size = len(output.rids)
    tokens, texts = getattr(output, "output_ids", None), getattr(output, "output_strs", None)
    completion = getattr(output, "completion_tokens", None) or repeat(0, size)
    return zip(
        tuple(output.rids),
        repeat((), size) if tokens is None else tokens,
        map(Counts, output.prompt_tokens, completion, output.cached_tokens),
        repeat("", size) if texts is None else texts,
        [reason is not None for reason in output.finished_reasons],
        strict=True,
    )


def write_back(output: Any, row: int, delivery: Delivery) -> None:
    """Make the row of a request that has moved say what it would have said otherwise."""
    output.prompt_tokens[row] = delivery.counts.prompt
    output.cached_tokens[row] = delivery.counts.cached
    if getattr(output, "completion_tokens", None):
        output.completion_tokens[row] = delivery.counts.completion
    if getattr(output, "output_ids", None) is not None:
        output.output_ids[row] = list(delivery.tokens)
    if getattr(output, "output_strs", None) is not None:
        output.output_strs[row] = delivery.text
    if delivery.withheld:
        _trim(output, row, _PER_TOKEN, delivery.withheld)
        _trim(output, row, _OF_THE_PROMPT, None)


def _trim(output: Any, row: int, names: tuple[str, ...], count: int | None) -> None:
    for name in names:
        held = getattr(output, name, None)
        if held is not None and row < len(held) and held[row]:
            held[row] = [] if count is None else held[row][count:]
