"""Requests that are alone on their ranks and move in mid-answer: what is computed with each token is the same before and
after, so that even in bfloat16 the answers can be compared token by token. For tests on any device."""

from __future__ import annotations

import random
import re

from eep.drill.load import Load, ask
from eep.drill.references import forget_prefixes
from eep.drill.sglang_server import Server
from eep.drill.story import Story

TOKENS = 96


def check_that_lone_requests_go_on_alike(server: Server, ranks: int, lengths: tuple[int, ...], seed: int = 17) -> None:
    """Each prompt is answered without a fault, once by its rank and once by another. Then its rank is killed in mid-answer,
    and its context comes along."""
    assert server.directory is not None
    choose = random.Random(seed)
    story = Story(server.directory, Load(server.url, [], []))
    unalike, moved = [], 0
    for number, length in enumerate(lengths):
        prompt, rank = [choose.randrange(3, 250) for _ in range(length)], number % ranks
        assert story.wait_until_all_run(ranks), server.log[-3000:]
        usual = []
        for each in (rank, (rank + 1) % ranks):
            forget_prefixes(server.url)
            answer = ask(server.url, prompt, TOKENS, rank=each)
            assert not answer.problem
            usual.append(answer.tokens)
        assert usual[0] == usual[1], "an answer depends on the rank that gives it"
        forget_prefixes(server.url)
        killed: list[int] = []

        def kill_once(tokens: int, rank: int = rank, killed: list[int] = killed) -> None:
            if tokens >= TOKENS // 3 and not killed:
                killed.append(tokens)
                story.kill(rank)

        got = ask(server.url, prompt, TOKENS, rank=rank, seen=kill_once)
        assert not got.problem
        assert killed
        moved += 1
        if got.tokens != usual[0]:
            place = next(at for at, pair in enumerate(zip(got.tokens, usual[0], strict=True)) if pair[0] != pair[1])
            unalike.append((length, killed[0], place))
    assert story.wait_until_all_run(ranks), server.log[-3000:]
    story.close()
    came = re.findall(r"has (\d+) of (\d+) tokens from rank", server.log)
    assert len(came) == moved, "not every context came along"
    assert unalike == [], "length of the prompt, tokens at the kill, first token that differs"
