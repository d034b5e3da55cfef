"""Requests with long contexts, whose ranks are killed under them."""

from __future__ import annotations

import random
import re

from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from eep.drill.token_certainty import clear_prompts
from tests.sglang.drills import wait_for_answers

RANKS, TOKENS = 4, 128
LENGTHS = (40, 150, 400, 900, 1500, 2300, 3000, 3900)


def check_that_contexts_come_along(server: Server) -> None:
    """One rank is killed, another, and two at once."""
    assert server.directory is not None
    choose, before = random.Random(3), len(server.log)
    prompts = [[choose.randrange(3, 250) for _ in range(length)] for length in LENGTHS for _ in range(3)]
    clear = clear_prompts(server.url, prompts, 16, TOKENS)
    load = Load.with_reference(server.url, clear, tokens=TOKENS, clients=16)
    story = Story(server.directory, load)
    with load:
        for lost in ((2,), (1,), (0, 3)):
            wait_for_answers(load, 32)
            lives = {rank: story.target.ranks()[rank].incarnation for rank in lost}
            for rank in lives:
                story.kill(rank)
            assert story.wait_until_back(RANKS, lives), server.log[-3000:]
        wait_for_answers(load, 32)
    story.close()
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    taken = re.findall(r"has (\d+) of (\d+) tokens from rank", server.log[before:])
    print(f"{len(load.answers)} answers; {len(taken)} contexts came along, {sum(int(had) for had, _ in taken)} tokens")
    assert taken, "every context was computed again"
