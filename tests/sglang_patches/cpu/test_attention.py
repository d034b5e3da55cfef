"""A sequence that is extended by few tokens is computed as in decodes; others, as SGLang does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_patches.cpu import attention

LENGTHS, NEW = [9, 5, 7, 80], [1, 3, 7, 40]
NAMED = {"scaling": 0.5, "enable_gqa": True, "causal": True, "is_cross_attn": False}


class Backend:
    """Writes down what it is asked, and into each row of the output which function it came from."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def _run_sdpa_forward_decode(self, query: Any, output: Any, *given: Any, **named: Any) -> Any:
        self.asked.append(("decode", (query.tolist(), [each.tolist() for each in given[3:5]], given[5:], named)))
        output += 1
        return output

    def extend(self, query: Any, output: Any, *given: Any, **named: Any) -> Any:
        self.asked.append(("extend", (query.tolist(), [each.tolist() for each in given[3:7]], given[7:], named)))
        output += 2
        return output


def extend(backend: Backend, new: list[int], *more: Any, **changes: Any) -> torch.Tensor:
    count = sum(new)
    query = torch.arange(count, dtype=torch.float32).view(count, 1, 1)
    output = torch.zeros(count + 2, 1, 1)  # a step may be padded
    lengths = torch.tensor(LENGTHS[: len(new)])
    given = (torch.arange(len(new)) + 10, lengths, lengths - torch.tensor(new), torch.tensor(new))
    caches = (torch.empty(0),) * 3
    named = {**NAMED, **changes}
    assert attention._extend(Backend.extend, backend, query, output, *caches, *given, *more, **named) is output
    return output.flatten()


def test_few_tokens_are_decodes_that_look_at_one_more_key_each() -> None:
    backend = Backend()
    output = extend(backend, NEW, None)
    assert output.tolist() == [*[1.0] * 4, *[2.0] * 47, 0.0, 0.0]
    decode = {**NAMED, "causal": False}
    rows = [[[float(number)]] for number in range(51)]
    assert (
        backend.asked
        == [
            ("decode", (rows[:1], [[10], [9]], (None,), decode)),
            ("decode", (rows[1:4], [[11] * 3, [3, 4, 5]], (None,), decode)),
            ("extend", (rows[4:11], [[12], [7], [0], [7]], (None,), NAMED)),  # there is no prefix
            ("extend", (rows[11:], [[13], [80], [40], [40]], (None,), NAMED)),  # these are not few
        ]
    )


@pytest.mark.parametrize(
    ("new", "more", "changes"),
    [([9, 5], (), {}), (NEW, (torch.ones(4),), {}), (NEW, (), {"encoder_lens": 1}), (NEW, (), {"causal": False})],
    ids=["no prefix", "encoder", "encoder by name", "not causal"],
)
def test_what_is_no_decode_goes_to_sglang_as_a_whole(new: list[int], more: Any, changes: dict[str, Any]) -> None:
    backend = Backend()
    extend(backend, new, *more, **changes)
    assert [kind for kind, _ in backend.asked] == ["extend"]
