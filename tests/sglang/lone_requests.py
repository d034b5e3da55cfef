"""Requests that are alone on their ranks and move in mid-answer, with contexts that are the same to the last bit: even in
bfloat16 the answers can be compared token by token. For tests on any device."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from eep.drill.load import Load, ask
from eep.drill.references import forget_prefixes
from eep.drill.sglang_server import Server
from eep.drill.story import Story

TOKENS = 96


@dataclass(frozen=True)
class Moved:
    prompt: list[int]
    tokens: list[int]
    """Of the answer. It does not depend on the rank that gives it, without a fault."""
    usual: list[int]
    """Of the answer without a fault."""
    known: int
    """How many tokens of the prompt and the answer there were when it moved."""
    came: int
    """Of how many of these the cache came along."""

    def parting(self, other: Sequence[int]) -> tuple[int, int, int | None]:
        """Length of the prompt, tokens of the answer when it moved, and the first that differs from the others."""
        pairs = enumerate(zip(self.tokens, other, strict=True))
        return len(self.prompt), self.known - len(self.prompt), next((at for at, (a, b) in pairs if a != b), None)


def check_that_lone_requests_go_on_alike(server: Server, ranks: int, lengths: tuple[int, ...]) -> None:
    """As without a fault: where a token is computed alike by a prefill and by a decode."""
    partings = [each.parting(each.usual) for each in _move(server, ranks, lengths)]
    assert [each for each in partings if each[-1] is not None] == []


def check_that_lone_requests_go_on_as_from_a_prefix(server: Server, ranks: int, lengths: tuple[int, ...]) -> None:
    """As without a fault and a move, if the answer is asked for in two parts, and the second finds as much of its prompt in
    the prefix cache as came along: where a token is rounded otherwise by a prefill than by a decode."""
    partings = []
    for each in _move(server, ranks, lengths):
        forget_prefixes(server.url)
        answered = each.known - len(each.prompt)
        _answer(server, each.prompt, each.came + 1 - len(each.prompt))
        rest = _answer(server, each.prompt + each.tokens[:answered], TOKENS - answered)
        partings.append(each.parting(each.tokens[:answered] + rest))
        print(f"alike without a fault up to {each.parting(each.usual)}, as from a prefix {partings[-1]}")
    assert [each for each in partings if each[-1] is not None] == []


def _move(server: Server, ranks: int, lengths: tuple[int, ...]) -> list[Moved]:
    """Each prompt is answered without a fault, once by its rank and once by another. Then its rank is killed in mid-answer,
    and its context comes along."""
    assert server.directory is not None
    choose = random.Random(17)
    story = Story(server.directory, Load(server.url, [], []))
    answers: list[tuple[list[int], list[int], list[int]]] = []
    for number, length in enumerate(lengths):
        prompt, rank = [choose.randrange(3, 250) for _ in range(length)], number % ranks
        assert story.wait_until_all_run(ranks), server.log[-3000:]
        usual = []
        for each in (rank, (rank + 1) % ranks):
            forget_prefixes(server.url)
            usual.append(_answer(server, prompt, TOKENS, each))
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
        answers.append((prompt, got.tokens, usual[0]))
    assert story.wait_until_all_run(ranks), server.log[-3000:]
    story.close()
    counts = re.findall(r"has (\d+) of (\d+) tokens from rank", server.log)
    assert len(counts) == len(answers), "not every context came along"
    return [Moved(*answer, int(known), int(came)) for answer, (came, known) in zip(answers, counts, strict=True)]


def _answer(server: Server, prompt: Sequence[int], tokens: int, rank: int | None = None) -> list[int]:
    answer = ask(server.url, prompt, tokens, rank=rank)
    assert not answer.problem
    return answer.tokens
