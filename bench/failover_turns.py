"""A step with and without elasticity, in quick turns under one load: what a rank does for it in every step, told exactly.

Phases of seconds differ by several per cent, by how the beginnings of requests fall and by what else the machine does. Here
every client streams one long answer, so that all steps decode the same batch, and the switch is thrown several times in
a second. Four turns are a *block*, the first and the last of one kind, so that what drifts hits both alike. Of which kind,
and how long its turns are, is drawn for each block, so that what comes every second does not always hit the same. Only the
ranks take turns: the front end knows every request from its beginning, so it stays elastic.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from failover_steady import Clients, join
from fixed_membership import Switch

from eep.drill.load import Answer

_ORDERS = ((True, False, False, True), (False, True, True, False))
_SHORTER, _LONGER = 0.7, 1.3
"""How long the turns of a block may be, as shares of what was asked for."""
_LEFT_OUT = 0.1
"""Of every turn, at its beginning: steps that began in the last one."""


@dataclass(frozen=True)
class Lengths:
    """How long a turn is on average, in seconds, and how many tokens an answer has, which should last for many turns."""

    turn: float
    tokens: int


OF_DEVICE = {"cpu": Lengths(1.0, 400), "cuda": Lengths(0.25, 3000)}


@dataclass(frozen=True)
class Turn:
    elastic: bool
    began: float
    ended: float


@dataclass(frozen=True)
class Compared:
    """Tokens per second with elasticity over those without, of all blocks."""

    blocks: int
    mean: float
    least: float
    most: float
    """The ends of the 95 % interval of the mean."""
    median: float
    """Of the blocks: what a few that were disturbed hardly change."""


def planned(choose: random.Random, length: float) -> Iterator[tuple[bool, float]]:
    """Whether each turn is elastic, and how many seconds it is to last, block after block."""
    while True:
        seconds = length * choose.uniform(_SHORTER, _LONGER)
        for elastic in choose.choice(_ORDERS):
            yield elastic, seconds


def take_turns(
    clients: Clients, switch: Switch, rounds: int, lengths: Lengths, seed: int, say: Callable[[str], None]
) -> list[float]:
    """The ratio of every block, of as many ``rounds`` of long answers. RuntimeError if an answer is not right."""
    found: list[float] = []
    choose = random.Random(seed)
    for number in range(rounds):
        answers, turns = _round(clients, switch, lengths, choose)
        if problems := clients.problems(answers):
            raise RuntimeError(f"while ranks took turns: {problems[0]}")
        found += ratios(answers, turns)
        say(f"round {number + 1:2} of {rounds} in turns of {lengths.turn:g} s: {_said(found)}")
    return found


def _said(found: Sequence[float]) -> str:
    if len(found) < 2:
        return "too few blocks yet"
    so_far = compared(found)
    return (
        f"elastic/fixed {so_far.mean:.4f} ({so_far.least:.4f} to {so_far.most:.4f}), in the median {so_far.median:.4f}, "
        f"of {so_far.blocks} blocks"
    )


def _round(
    clients: Clients, switch: Switch, lengths: Lengths, choose: random.Random
) -> tuple[list[Answer], list[Turn]]:
    """One long answer for every client, and the turns that were taken meanwhile."""
    answers: list[Answer] = []
    one_is_over = threading.Event()

    def stream(client: int) -> None:
        answers.append(clients.ask(client, client, lengths.tokens))
        one_is_over.set()

    threads = [threading.Thread(target=stream, args=(client,), daemon=True) for client in range(clients.count)]
    for thread in threads:
        thread.start()
    turns: list[Turn] = []
    try:
        for elastic, seconds in planned(choose, lengths.turn):
            switch.throw(elastic=elastic, front_end=False)
            began = time.monotonic()
            if one_is_over.wait(seconds):
                break
            turns.append(Turn(elastic, began, time.monotonic()))
    finally:
        switch.throw(elastic=True)
    join(threads, 180)
    return answers, turns


def ratios(answers: Sequence[Answer], turns: Sequence[Turn]) -> list[float]:
    """Of every block in which all clients got tokens from its beginning to its end."""
    since = max(answer.times[0] for answer in answers)
    until = min(answer.times[-1] for answer in answers)
    found = []
    for first in range(0, len(turns) - 3, 4):
        block = turns[first : first + 4]
        if since <= block[0].began and block[-1].ended <= until:
            waits = {True: 0.0, False: 0.0}
            for turn in block:
                waits[turn.elastic] += _wait_for_a_token(answers, turn)
            found.append(waits[False] / waits[True])
    return found


def _wait_for_a_token(answers: Sequence[Answer], turn: Turn) -> float:
    """The mean of all waits that lie within a turn. ValueError if there are none."""
    begin = turn.began + _LEFT_OUT * (turn.ended - turn.began)
    waited, count = 0.0, 0
    for answer in answers:
        inside = answer.times[bisect_left(answer.times, begin) : bisect_right(answer.times, turn.ended)]
        if len(inside) > 1:
            waited += inside[-1] - inside[0]
            count += len(inside) - 1
    if not count:
        raise ValueError(
            f"no client got two tokens in a turn of {turn.ended - turn.began:.2f} s: turns are too short here"
        )
    return waited / count


def compared(found: Sequence[float]) -> Compared:
    """ValueError if there are fewer than two blocks."""
    if len(found) < 2:
        raise ValueError(f"{len(found)} blocks of turns tell nothing: answers must last for at least eight turns")
    mean = statistics.fmean(found)
    off = 1.96 * statistics.stdev(found) / math.sqrt(len(found))
    return Compared(len(found), mean, mean - off, mean + off, statistics.median(found))
