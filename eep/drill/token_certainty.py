"""How sure a model is of each token of a greedy answer, and prompts of whose answers it is sure.

The result of a product depends, in its last bits, on what else is in the batch: libraries choose another order of adding
up for another size. Where two tokens are almost equally likely that decides between them, with one rank as with many, and it
says nothing about faults. So answers that are to be compared token by token are answers without such a place.

Where two *experts* are almost equally likely for a token it is the same, and that shows in no likelihood of tokens. But it
shows when an answer is continued from each of its places, as the request of a lost rank is: then what was decoded token by
token is prefilled at once. Asked of a server that has lost no rank, every continuation should be the rest of the answer.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from eep.drill.load import ask

AT_ONCE = 16
"""How many requests a server is asked at the same time."""
LEAST = 1e-3
"""How far the likeliest token must be ahead, in nats: a thousand times what float32 differs by from batch to batch."""


def weigh_answer(
    url: str, prompt: Sequence[int], tokens: int, timeout: float = 120.0, rank: int | None = None
) -> tuple[list[int], float]:
    """The greedy answer to ``prompt``, and by how much the likeliest token is ahead of the next at its closest place. If
    ``rank`` is given, that one is to serve it."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **({} if rank is None else {"routed_dp_rank": rank}),
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        answer = json.load(reply)
    places = answer["meta_info"]["output_top_logprobs"]
    return list(answer["output_ids"]), min(float(first[0]) - float(second[0]) for first, second in places)


def margin(url: str, prompt: Sequence[int], tokens: int, timeout: float = 120.0) -> float:
    """By how much the likeliest token is ahead of the next, at the closest place of the greedy answer to ``prompt``."""
    return weigh_answer(url, prompt, tokens, timeout)[1]


def goes_on_alike(url: str, prompt: Sequence[int], tokens: int) -> bool:
    """Whether every continuation of the greedy answer is the rest of it."""
    answer = ask(url, prompt, tokens)

    def is_alike(place: int) -> bool:
        rest = ask(url, [*prompt, *answer.tokens[:place]], tokens - place)
        return not rest.problem and rest.tokens == answer.tokens[place:]

    with ThreadPoolExecutor(AT_ONCE) as clients:
        return not answer.problem and all(clients.map(is_alike, range(tokens)))


def clear_prompts(
    url: str,
    candidates: Iterable[Sequence[int]],
    count: int,
    tokens: int,
    least: float = LEAST,
    *,
    continued: bool = False,
    timeout: float = 120.0,
) -> list[list[int]]:
    """The first ``count`` candidates of whose answers the model is sure at every place. ValueError if there are too few.

    ``continued``: their continuations are asked for too. ``timeout``: seconds that the answer to one may take.
    """
    found: list[list[int]] = []
    tried, left = 0, iter(candidates)
    with ThreadPoolExecutor(AT_ONCE) as clients:
        while some := list(islice(left, count)):
            for prompt, ahead in zip(
                some, clients.map(lambda each: margin(url, each, tokens, timeout), some), strict=True
            ):
                tried += 1
                if ahead >= least and (not continued or goes_on_alike(url, prompt, tokens)):
                    found.append(list(prompt))
                    if len(found) == count:
                        return found
    raise ValueError(
        f"of {tried} prompts only {len(found)} have answers in which every token is {least:g} nats ahead"
        f"{' and that go on alike from every place' if continued else ''}; {count} are needed"
    )
