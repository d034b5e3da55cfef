"""Which rank is killed when, under contexts of which length, and whether they are restored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RANKS = 4
RESTORED, COPIED, PREFILL = "restored", "host copy", "prefill"
WAYS = {
    RESTORED: "restored from the lost rank's memory",
    COPIED: "restored from the copy in host memory",
    PREFILL: "computed again, by prefill",
}
PROMPT_TOKENS = 1 << 17
"""Of all long prompts of a kill together, at most, unless it is a single one: to compute them before each kill takes time."""
LEAST, MOST = 32, 1 << 20
"""Tokens of a context. Contexts that are shorter are hardly ever restored."""


@dataclass(frozen=True)
class Turn:
    """One kill to do."""

    context: int
    """Tokens of each long prompt."""
    way: str
    rank: int


def parse_contexts(text: str) -> list[int]:
    """Lengths with commas between, in order, each once. ValueError says what is wrong."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{text!r}: give numbers of tokens with commas between, such as 128,2048") from None
    if found[0] < LEAST or found[-1] > MOST:
        raise ValueError(f"{text!r}: a context has from {LEAST} to {MOST} tokens")
    return found


def count_long(context: int, most: int) -> int:
    """How many clients have prompts of this length."""
    return max(1, min(most, PROMPT_TOKENS // context))


def plan(
    contexts: Sequence[int], ways: Sequence[str], kills: int, ranks: int, seed: int, restored: int = 1
) -> list[Turn]:
    """Lengths and ways in turns, so that whatever changes on the machine meanwhile hits all of them; contexts are
    ``restored`` so many times as often as each other way is taken. Ranks follow each other in one order, so that each has as
    long as can be until it is killed again. The seed decides the orders."""
    choose, turns = random.Random(seed), list[Turn]()
    victims = choose.sample(range(ranks), ranks)
    often = [way for way in ways for _ in range(restored if way == RESTORED else 1)]
    while len(turns) < kills:
        for context in choose.sample(list(contexts), len(contexts)):
            for way in choose.sample(often, len(often)):
                turns.append(Turn(context, way, victims[len(turns) % ranks]))
    return turns[:kills]


def make_prompts(choose: random.Random, count: int, least: int, most: int) -> list[list[int]]:
    """Of random tokens, each with another first one: no two have a prefix in common. At most 247 of them."""
    firsts = choose.sample(range(3, 250), count)
    return [[first, *choose.choices(range(3, 250), k=choose.randint(least, most) - 1)] for first in firsts]
