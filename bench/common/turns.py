"""A step with something on and off, in quick turns under one load: what a rank does for it in every step, told exactly.

Phases of seconds differ by several per cent, by how the beginnings of requests fall and by what else the machine does. Here
every client streams one long answer, so that all steps decode the same batch, and the switch is thrown several times in
a second. Four turns are a *block*, the first and the last of one kind, so that what drifts hits both alike. Of which kind,
and how long its turns are, is drawn for each block, so that what comes every second does not always hit the same. Requests
are under way when the switch is thrown, so it may only be one that ranks do not mind then.

Steps are timed by the ranks. If one takes many times as long as the others, the machine has done something else. Where such
a *stall* falls is chance, and a few of them would be more than what is looked for. So the steps are compared with and
without stalls, and it is told how much of the time stalls took of each kind.
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
from itertools import pairwise

from bench.common.steady_clients import Clients, join
from eep.drill.query_answers import Answer

_ORDERS = ((True, False, False, True), (False, True, True, False))
_SHORTER, _LONGER = 0.7, 1.3
"""How long the turns of a block may be, as shares of what was asked for."""
_LEFT_OUT = 0.1
"""Of every turn, at its beginning: steps that began in the last one."""
_STALL = 2.0
"""A step that takes more than so many times what most take is one."""


@dataclass(frozen=True)
class Lengths:
    """How long a turn is on average, in seconds, and how many tokens an answer has, which should last for many turns."""

    turn: float
    tokens: int


OF_DEVICE = {"cpu": Lengths(1.0, 400), "cuda": Lengths(0.25, 3000)}


@dataclass(frozen=True)
class Turn:
    on: bool
    began: float
    ended: float


@dataclass(frozen=True)
class Block:
    """Of the steps of four turns, two of each kind."""

    ratio: float
    """Steps per second with it on over those with it off."""
    without_stalls: float
    """The same, of the steps that were none."""
    off_ms: float
    """What such a step takes with it off."""
    on_stalled: float
    off_stalled: float
    """Which share of the time stalls took."""


@dataclass(frozen=True)
class Compared:
    """Steps per second with it on over those with it off, of all blocks."""

    blocks: int
    mean: float
    least: float
    most: float
    """The ends of the 95 % interval of the mean."""
    median: float
    """Of the blocks: what a few that were disturbed hardly change."""


OF_TURNS = {
    "of_all_steps": "all steps",
    "without_stalls": "without stalls: steps that took more than twice the median of their kind",
}


@dataclass(frozen=True)
class Taken:
    blocks: list[Block]
    turns: list[Turn]
    """Those that count, four for each block."""


def planned(choose: random.Random, length: float) -> Iterator[tuple[bool, float]]:
    """Whether it is on in each turn, and how many seconds the turn is to last, block after block."""
    while True:
        seconds = length * choose.uniform(_SHORTER, _LONGER)
        for on in choose.choice(_ORDERS):
            yield on, seconds


def take_turns(
    clients: Clients,
    throw: Callable[[bool], None],
    steps: Callable[[], list[list[float]]],
    names: tuple[str, str],
    rounds: int,
    lengths: Lengths,
    seed: int,
    say: Callable[[str], None],
) -> Taken:
    """Those of as many ``rounds`` of long answers. ``steps``: of every rank, when its steps began. ``names``: what on and off
    are called. RuntimeError if an answer is not right."""
    found = Taken([], [])
    choose = random.Random(seed)
    for number in range(rounds):
        answers, turns = _round(clients, throw, lengths, choose)
        if problems := clients.problems(answers):
            raise RuntimeError(f"while ranks took turns: {problems[0]}")
        whole = _while_all_stream(answers, turns)
        found.turns.extend(whole)
        found.blocks.extend(blocks(steps(), whole))
        say(f"round {number + 1:2} of {rounds} in turns of {lengths.turn:g} s: {_said(found.blocks, names)}")
    return found


def _said(found: Sequence[Block], names: tuple[str, str]) -> str:
    if len(found) < 2:
        return "too few blocks yet"
    so_far = {
        "/".join(names): compared([block.ratio for block in found]),
        "without stalls": compared([block.without_stalls for block in found]),
    }
    told = (f"{what} {each.mean:.4f} ({each.least:.4f} to {each.most:.4f})" for what, each in so_far.items())
    return f"{', '.join(told)}, of {len(found)} blocks"


def _round(
    clients: Clients, throw: Callable[[bool], None], lengths: Lengths, choose: random.Random
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
        for on, seconds in planned(choose, lengths.turn):
            throw(on)
            began = time.monotonic()
            if one_is_over.wait(seconds):
                break
            turns.append(Turn(on, began, time.monotonic()))
    finally:
        throw(True)
    join(threads, 180)
    return answers, turns


def _while_all_stream(answers: Sequence[Answer], turns: Sequence[Turn]) -> list[Turn]:
    """Those of the blocks in which all clients got tokens from the beginning to the end."""
    since = max(answer.times[0] for answer in answers)
    until = min(answer.times[-1] for answer in answers)
    found: list[Turn] = []
    for first in range(0, len(turns) - 3, 4):
        block = turns[first : first + 4]
        if since <= block[0].began and block[-1].ended <= until:
            found += block
    return found


def blocks(steps: Sequence[Sequence[float]], turns: Sequence[Turn]) -> list[Block]:
    """Four turns are one. ``steps``: of every rank, when its steps began. ValueError if a turn has none."""
    found = []
    for first in range(0, len(turns), 4):
        took: dict[bool, list[float]] = {True: [], False: []}
        for turn in turns[first : first + 4]:
            took[turn.on] += _steps_of(steps, turn)
        found.append(_block(took[True], took[False]))
    return found


def _steps_of(steps: Sequence[Sequence[float]], turn: Turn) -> list[float]:
    """How long those took that lie within a turn, on all ranks."""
    begin = turn.began + _LEFT_OUT * (turn.ended - turn.began)
    took = [
        later - earlier
        for began in steps
        for earlier, later in pairwise(began[bisect_left(began, begin) : bisect_right(began, turn.ended)])
    ]
    if not took:
        raise ValueError(
            f"no step began and ended in a turn of {turn.ended - turn.began:.2f} s: turns are too short here"
        )
    return took


def _block(on: Sequence[float], off: Sequence[float]) -> Block:
    # Of each kind, or steps that are twice as long because it is on would all be taken for stalls.
    usual_on, usual_off = _without_stalls(on), _without_stalls(off)
    return Block(
        ratio=statistics.fmean(off) / statistics.fmean(on),
        without_stalls=statistics.fmean(usual_off) / statistics.fmean(usual_on),
        off_ms=1000 * statistics.fmean(usual_off),
        on_stalled=1 - sum(usual_on) / sum(on),
        off_stalled=1 - sum(usual_off) / sum(off),
    )


def _without_stalls(took: Sequence[float]) -> list[float]:
    longest = _STALL * statistics.median(took)
    return [step for step in took if step <= longest]


def compared(found: Sequence[float]) -> Compared:
    """ValueError if there are fewer than two blocks."""
    if len(found) < 2:
        raise ValueError(f"{len(found)} blocks of turns tell nothing: answers must last for at least eight turns")
    mean = statistics.fmean(found)
    off = 1.96 * statistics.stdev(found) / math.sqrt(len(found))
    return Compared(len(found), mean, mean - off, mean + off, statistics.median(found))
