"""Which numbers of a request a rank can take. A scheduler uses them as indices and sizes without a look: one that is out of
range is an exception there, and ends the rank. So the front end looks at all of them, and names the field that is wrong.

The functions read requests by the names of their fields, which are the same in all supported versions of SGLang. A field that
a version does not have counts as empty.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_patches.front_end.sampling_fields import MOST_SAMPLES

INT32 = 2**31 - 1
INT64 = 2**63 - 1
FLOAT32 = 3.4028234e38
MOST_PROMPT_LOGPROBS = 2**24
"""Log-probabilities of the tokens of one prompt. Each is a number that a rank makes an object of."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model has."""

    vocabulary: int
    """How many tokens."""
    hidden: int
    """The width of an embedding."""
    context: int
    """The most tokens of a prompt and its answer."""


def check_ranges(message: Any, limits: RequestLimits) -> None:
    """ValueError if a number of a tokenized request is out of range. Its text names the field."""
    for fault in _faults(message, limits):
        raise ValueError(fault)


def _faults(message: Any, limits: RequestLimits) -> Iterator[str]:
    """What is wrong with a request, a sentence each. Later checks rely on earlier ones."""
    tokens, embeds = getattr(message, "input_ids", None), getattr(message, "input_embeds", None)
    if embeds is not None:
        yield from _embed_faults(embeds, limits)
    elif tokens is not None and not len(tokens):
        yield "input_ids must hold a token at least: the prompt is empty"
    yield from _token_faults("input_ids", () if tokens is None else tokens, limits)
    length = len(embeds) if embeds is not None else len(tokens or ())
    yield from _logprob_faults(message, length, limits)
    yield from _position_faults(message, length)
    if getattr(message, "lora_id", None) is not None:
        yield f"lora_id must be left out, and is {message.lora_id!r}: --ep-backend eep serves no adapters"
    parameters = getattr(message, "sampling_params", None)
    if parameters is not None:
        yield from _sampling_faults(parameters, limits)


def _embed_faults(embeds: Any, limits: RequestLimits) -> Iterator[str]:
    try:
        values = np.asarray(embeds, dtype=np.float64)
    except (TypeError, ValueError):
        yield f"input_embeds must be rows of {limits.hidden} numbers each, and some rows differ in length or hold no numbers"
        return
    if values.ndim != 2 or values.shape[1] != limits.hidden:
        yield f"input_embeds must be rows of {limits.hidden} numbers each, and has the shape {values.shape}"
    elif not len(values):
        yield "input_embeds must have a row at least"
    elif not np.all(np.abs(values) <= FLOAT32):
        yield "input_embeds must hold numbers that fit into 32 bits"


def _token_faults(name: str, tokens: Collection[int], limits: RequestLimits) -> Iterator[str]:
    if not tokens:
        return
    # A prompt is an array, and may be long.
    values = np.asarray(tokens) if isinstance(tokens, array) else None
    for token in (min(tokens), max(tokens)) if values is None else (int(values.min()), int(values.max())):
        if not 0 <= token < limits.vocabulary:
            yield f"{name} must hold tokens from 0 to {limits.vocabulary - 1}, and holds {token}"


def _logprob_faults(message: Any, length: int, limits: RequestLimits) -> Iterator[str]:
    wanted = getattr(message, "token_ids_logprob", None) or ()
    yield from _token_faults("token_ids_logprob", wanted, limits)
    count, start = getattr(message, "top_logprobs_num", None) or 0, getattr(message, "logprob_start_len", None)
    yield from _range_fault("top_logprobs_num", count, 0, limits.vocabulary)
    if start is None:
        return
    # A session adds to its prompt what it had before, and how long that is only its rank knows.
    has_session = getattr(message, "session_params", None) is not None
    yield from _range_fault("logprob_start_len", start, -1, limits.context if has_session else length)
    rows = length - start if start >= 0 and getattr(message, "return_logprob", False) else 0
    for name, each in (("top_logprobs_num", count), ("token_ids_logprob", len(wanted))):
        if rows * each > MOST_PROMPT_LOGPROBS:
            yield (
                f"{name} asks for {each} log-probabilities of each of {rows} tokens of the prompt, and the most in all is "
                f"{MOST_PROMPT_LOGPROBS}; ask for fewer, or for a later logprob_start_len"
            )


def _position_faults(message: Any, length: int) -> Iterator[str]:
    """Of fields that name positions of the prompt."""
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        for position in _ends(getattr(message, name, None) or ()):
            yield from _range_fault(name, position, 0, length - 1)
    overrides = getattr(getattr(message, "positional_embed_overrides", None), "positions", None)
    for position in _ends(overrides or ()):
        yield from _range_fault("positional_embed_overrides", position, 0, length - 1)
    yield from _range_fault("routed_experts_start_len", getattr(message, "routed_experts_start_len", None), 0, length)


def _sampling_faults(parameters: Any, limits: RequestLimits) -> Iterator[str]:
    yield from _token_faults("stop_token_ids", getattr(parameters, "stop_token_ids", None) or (), limits)
    for name, least, most in (
        ("top_k", -1, INT32),
        ("min_new_tokens", 0, limits.context),
        ("max_new_tokens", 0, INT32),
        ("beam_width", 1, min(MOST_SAMPLES, limits.vocabulary)),
        ("stream_interval", 0, INT32),
        ("sampling_seed", -INT64 - 1, INT64),
    ):
        yield from _range_fault(name, getattr(parameters, name, None), least, most)
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        value = getattr(parameters, name, None)
        if value is not None and not math.isfinite(value):
            yield f"{name} must be a finite number, and is {value}"
    for token, bias in (getattr(parameters, "logit_bias", None) or {}).items():
        yield from _bias_faults(token, bias, limits)


def _bias_faults(token: Any, bias: float, limits: RequestLimits) -> Iterator[str]:
    try:
        number = int(token)
    except ValueError:
        yield f"logit_bias must have tokens as keys, and has {token!r}"
        return
    yield from _range_fault("logit_bias", number, 0, limits.vocabulary - 1)
    if not abs(bias) <= FLOAT32:
        yield f"logit_bias must hold numbers that fit into 32 bits, and holds {bias} for token {token}"


def _range_fault(name: str, value: int | None, least: int, most: int) -> Iterator[str]:
    if value is not None and not least <= value <= most:
        yield f"{name} must be from {least} to {most}, and is {value}"


def _ends(positions: Sequence[int]) -> Sequence[int]:
    return (min(positions), max(positions)) if positions else ()
