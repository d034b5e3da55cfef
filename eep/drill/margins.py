"""How sure a model is of each token of a greedy answer, and prompts of whose answers it is sure.

The result of a product depends, in its last bits, on what else is in the batch: libraries choose another order of adding
up for another size. Where two tokens are almost equally likely that decides between them, with one rank as with many, and it
says nothing about faults. So answers that are to be compared token by token are answers without such a place.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Sequence

LEAST = 1e-3
"""How far the likeliest token must be ahead, in nats: a thousand times what float32 differs by from batch to batch."""


def margin(url: str, prompt: Sequence[int], tokens: int, timeout: float = 120.0) -> float:
    """By how much the likeliest token is ahead of the next, at the closest place of the greedy answer to ``prompt``."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        places = json.load(answer)["meta_info"]["output_top_logprobs"]
    return min(float(first[0]) - float(second[0]) for first, second in places)


def clear_prompts(
    url: str, candidates: Iterable[Sequence[int]], count: int, tokens: int, least: float = LEAST
) -> list[list[int]]:
    """The first ``count`` candidates of whose answers the model is sure at every place. ValueError if there are too few."""
    found: list[list[int]] = []
    tried = 0
    for prompt in candidates:
        tried += 1
        if margin(url, prompt, tokens) >= least:
            found.append(list(prompt))
            if len(found) == count:
                return found
    raise ValueError(
        f"of {tried} prompts only {len(found)} have answers in which every token is {least:g} nats ahead; {count} are needed"
    )
