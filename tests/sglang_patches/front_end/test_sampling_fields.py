"""Fields of sampling parameters, as a client sent them: what is of another type is named before SGLang trips over it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_patches.front_end.sampling_fields import check_fields

KNOWN = frozenset(
    (
        *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "beam_width", "ignore_eos"),
        *("skip_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params"),
        *("json_schema", "regex", "ebnf", "structural_tag", "spaces_between_special_tokens", "ebnf_full_assistant"),
        *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "new_one"),
    )
)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", ("hot", [], {}, True, [1.0])),
        ("top_p", ("", [None])),
        ("max_new_tokens", ("2", 1.5, True, [2], {})),
        ("top_k", ("x", 2.0)),
        ("sampling_seed", ("x",)),
        ("n", ("x", [], {}, "", None, 0, -1, True, 1.5, 10**12)),
        ("stop", (5, 1.5, True, [5], [None], {})),
        ("stop_regex", (5, [1], [None], {}, "(", "a{99999999999}", "a**", "[", "(a+)+$", ["x", "a*"])),
        ("stop_token_ids", (5, True, "x", ["1"], [5.0], {})),
        ("ignore_eos", ("yes", 1, [])),
        ("json_schema", ({"type": "object"}, 5)),
        ("regex", ([],)),
        ("logit_bias", (5, [None], "x", {"1": "x"}, {"1": None}, {"1": True})),
        ("custom_params", ("hot", 5, [])),
        ("nonsense", (1, None)),
        ("is_normalized", (True, None)),
        ("stop_regex_strs", (["(a+)+$"],)),
        ("stop_str_max_len", (5,)),
    ],
)
def test_a_field_that_no_rank_can_take_is_named(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        for parameters in ({field: value}, [{}, {"n": 1, field: value}]):
            with pytest.raises(ValueError, match=f"^{field} must|^sampling_params has no field '{field}'"):
                check_fields(parameters, KNOWN)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        [{}, {"n": 2}],
        dict.fromkeys(sorted(KNOWN - {"n", "is_normalized"} - {name for name in KNOWN if name.startswith("stop_")})),
        {"temperature": 0, "top_p": 0.5, "max_new_tokens": 5, "stop": "x", "stop_regex": "[.!?]", "n": 1024},
        {"stop": ["x", "y"], "stop_regex": ["x", r"\d{1,5}"], "stop_token_ids": [1, None], "ignore_eos": True},
        {"logit_bias": {"1": 1, "2": -0.5}, "custom_params": {"a": [1]}, "json_schema": "{}", "new_one": object()},
    ],
)
def test_what_sglang_takes_is_let_through(parameters: Any) -> None:
    check_fields(parameters, KNOWN)


@pytest.mark.parametrize("parameters", ["x", 5, [1], [None], True])
def test_sampling_parameters_that_are_none_are_refused(parameters: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params must be an object, or a list of them"):
        check_fields(parameters, KNOWN)


def test_a_long_value_is_not_said_whole() -> None:
    with pytest.raises(ValueError, match="temperature must be a number") as caught:
        check_fields({"temperature": "x" * 10_000}, KNOWN)
    assert len(str(caught.value)) < 200
