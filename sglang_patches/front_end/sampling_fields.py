"""The types of sampling parameters. SGLang makes an object of what a client sent to ``/generate`` without a look at types:
one that is wrong is an exception somewhere later, and status 500. So the front end looks first, and names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sglang_patches.front_end.stop_patterns import check_patterns

MOST_SAMPLES = 1024
"""Samples of one request. Each of them is a request of its own."""
INTERNAL = frozenset(("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"))
"""Fields that SGLang fills in. A client that gave them would go past its checks, and ours."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list | set | tuple) and all(each is None or _is_integer(each) for each in value)


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count_of_samples(value: Any) -> bool:
    return _is_integer(value) and 1 <= value <= MOST_SAMPLES


_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "beam_width", "stream_interval", "sampling_seed")
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_TEXTS = ("json_schema", "regex", "ebnf", "structural_tag")
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_INTEGERS, (_is_integer, "an integer")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(_FLAGS, (_is_flag, "true or false")),
    **dict.fromkeys(_TEXTS, (_is_text, "a text")),
    **dict.fromkeys(("stop", "stop_regex"), (_are_texts, "a text or a list of texts")),
    "stop_token_ids": (_are_tokens, "a list of integers"),
    "logit_bias": (_are_biases, "an object with numbers"),
    "custom_params": (_is_object, "an object"),
}


def check_fields(sampling_params: Any, known: Collection[str]) -> None:
    """ValueError if sampling parameters, as a client sent them, are not of their types. Its text names the field.

    ``sampling_params`` is a dictionary, a list of them for a batch, or None; ``known`` are the fields that SGLang has."""
    if sampling_params is None:
        return
    for each in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        if not isinstance(each, dict):
            raise ValueError(f"sampling_params must be an object, or a list of them, and is {_shown(sampling_params)}")
        for name, value in each.items():
            _check(name, value, known)


def _check(name: str, value: Any, known: Collection[str]) -> None:
    if name not in known or name in INTERNAL:
        raise ValueError(f"sampling_params has no field {_shown(name)}; leave it out")
    if name == "n":
        if not _is_count_of_samples(value):
            raise ValueError(f"n must be a number from 1 to {MOST_SAMPLES}, and is {_shown(value)}")
        return
    fits, what = _TYPES.get(name, (None, ""))
    if value is None or fits is None:  # none: as if the client had left it out
        return
    if not fits(value):
        raise ValueError(f"{name} must be {what}, and is {_shown(value)}")
    if name == "stop_regex":
        check_patterns([value] if isinstance(value, str) else value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
