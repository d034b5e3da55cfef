"""The load of a soak: few clients that stream one short answer after the other, and check every token."""

from __future__ import annotations

import random

from eep.drill.load import Load
from eep.drill.token_certainty import clear_prompts

_PROMPTS, _TOKENS = 8, 16


def make_light_load(url: str, clients: int) -> Load:
    choose = random.Random(3)
    candidates = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(4 * _PROMPTS)]
    prompts = clear_prompts(url, candidates, _PROMPTS, _TOKENS)
    return Load.with_reference(url, prompts, tokens=_TOKENS, clients=clients)
