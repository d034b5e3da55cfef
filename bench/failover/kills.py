"""Kills, one after the other, of ranks that serve; and what each of them cost."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eep.drill.faults import Target
from eep.drill.load import Load
from eep.drill.query_answers import Answer
from eep.drill.story import Fault, Story
from eep.observe.timeline import Moment

WINDOW = 3.0
"""Seconds of load before a kill and after a rejoin, over which throughput is taken."""

_SHOWN = 4
"""How many tokens of a wrong answer are told."""
_BROUGHT_IN = re.compile(r"epoch \d+: (\d+) experts brought in \((.*)\)")
_FROM = re.compile(r"(\d+) KiB from (\w+)")


@dataclass(frozen=True)
class Kill:
    """Seconds from the SIGKILL, where not said otherwise."""

    rank: int
    at: float
    """Since the beginning of the story."""
    view: float
    """The view without the rank is committed."""
    repaired: float
    """All survivors run in it."""
    first_token: float
    """The first token reaches a client after that."""
    rejoined: float
    """The rank is back, and all run."""
    pause: float
    """The longest wait for a token of any client, of the waits that touch the time from the kill to the repair."""
    pause_moved: float
    """Of these, the longest of those whose requests the lost rank had."""
    pause_others: float
    """And of all others."""
    pause_at_rejoin: float
    """The same for the change of view that lets the rank back in."""
    rejoining: float
    """How long that change takes, from its commit until all run: the others do nothing else meanwhile."""
    usual_gap: float
    """The longest wait that lies between the beginning of the window before the kill and the kill."""
    tokens_before: int
    tokens_during: int
    tokens_after: int
    """Tokens that clients got in the window before, from kill to rejoin, and in the window after."""


def brought_in(log: str) -> dict[str, int]:
    """By the log of a server: how many experts ranks brought in, each time for a layer, and how many KiB from where."""
    found: Counter[str] = Counter(experts=0)
    for experts, sources in _BROUGHT_IN.findall(log):
        found["experts"] += int(experts)
        for size, tier in _FROM.findall(sources):
            found[tier] += int(size)
    return dict(found)


def victims(ranks: int, kills: int, seed: int) -> list[int]:
    """Which rank each kill hits: every rank as often as any other, in an order that the seed decides."""
    choose, found = random.Random(seed), []
    while len(found) < kills:
        found += choose.sample(range(ranks), ranks)
    return found[:kills]


def kill_all(story: Story, ranks: int, order: Sequence[int], spares: int, say: Callable[[str], None]) -> list[Fault]:
    """Does the kills, under load, each when all spares are ready; RuntimeError if a rank does not come
    back.

    When interrupted it gives those that are over, if there are any: they took minutes.
    """
    over: list[Fault] = []
    try:
        for number, rank in enumerate(order, 1):
            time.sleep(2 * WINDOW if number > 1 else WINDOW)
            need_spares(story.target, spares)
            fault = kill_now(story, rank)
            if not (story.wait_until_noticed(fault) and story.wait_until_all_run(ranks)):
                raise RuntimeError(f"kill {number}: rank {rank} was lost and did not come back")
            say(f"kill {number:2} of {len(order)}: {fault}")
            over.append(fault)
        time.sleep(WINDOW)
    except KeyboardInterrupt:
        if not over:
            raise
        say(f"interrupted after {len(over)} of {len(order)} kills")
    return over


def need_spares(target: Target, count: int) -> None:
    """Waits until so many are ready. RuntimeError if they are not in time."""
    if (ready := len(target.wait_for_spares(count))) < count:
        raise RuntimeError(f"{ready} of {count} spares were ready in time: the server's log may say why")


def kill_now(story: Story, rank: int) -> Fault:
    """As :meth:`Story.kill`, without the time that it takes to ask for the process. RuntimeError if it has none."""
    pid = story.target.ranks()[rank].pid
    if pid is None:
        raise RuntimeError(f"rank {rank} has no process")
    fault = Fault(rank, "killed", time.monotonic())
    story.faults.append(fault)
    os.kill(pid, signal.SIGKILL)
    story.moments.append(Moment(fault.at - story.started, f"rank {rank} killed", "fault"))
    return fault


def costs(story: Story, faults: Sequence[Fault]) -> list[Kill]:
    """What the kills cost. To be asked when the load has ended: an answer counts when it is whole."""
    tokens = story.load.token_times()
    return [_cost(story, fault, tokens) for fault in faults]


def _cost(story: Story, fault: Fault, tokens: Sequence[float]) -> Kill:
    assert fault.noticed is not None
    assert fault.running is not None
    assert fault.rejoined is not None
    running, rejoined = fault.at + fault.running, fault.at + fault.rejoined
    agreed = max(at for at, view, runs in story.views if not runs and fault.rank in view.active and at <= rejoined)

    def count(since: float, until: float) -> int:
        return bisect_left(tokens, until) - bisect_left(tokens, since)

    return Kill(
        rank=fault.rank,
        at=fault.at - story.started,
        view=fault.noticed,
        repaired=fault.running,
        first_token=tokens[bisect_left(tokens, running)] - fault.at,
        rejoined=fault.rejoined,
        pause=story.load.largest_gap(fault.at, running),
        pause_moved=story.load.largest_gap(fault.at, running, lambda answer: _is_moved(answer, fault)),
        pause_others=story.load.largest_gap(fault.at, running, lambda answer: not _is_moved(answer, fault)),
        pause_at_rejoin=story.load.largest_gap(agreed, rejoined),
        rejoining=rejoined - agreed,
        usual_gap=_longest_within(story.load, fault.at - WINDOW, fault.at),
        tokens_before=count(fault.at - WINDOW, fault.at),
        tokens_during=count(fault.at, rejoined),
        tokens_after=count(rejoined, rejoined + WINDOW),
    )


@dataclass(frozen=True)
class Wrong:
    """An answer with a wrong token."""

    prompt: int
    place: int | None
    """Of the first such token; None where not its tokens are wrong, but its text or counts."""
    rank: int | None
    """That was to serve it."""
    at: float
    """When that token, or the last one, came, since the beginning of the story."""
    got: list[int]
    wanted: list[int]
    """Its tokens from there on, and what they should be: a few."""
    moved_after: int | None
    """How many tokens the client had when the rank that served it was killed; None if that did not happen."""


def wrong_answers(story: Story, faults: Sequence[Fault]) -> list[Wrong]:
    return [_wrong(story, answer, faults) for answer in story.load.wrong]


def _wrong(story: Story, answer: Answer, faults: Sequence[Fault]) -> Wrong:
    wanted = list(story.load.wanted_tokens(answer))
    pairs = enumerate(zip(answer.tokens, wanted, strict=False))
    place = next((number for number, (token, other) in pairs if token != other), None)
    shown = place or 0
    kills = [fault.at for fault in faults if _is_moved(answer, fault) and fault.at < answer.times[-1]]
    return Wrong(
        prompt=answer.prompt,
        place=place,
        rank=answer.rank,
        at=answer.times[-1 if place is None or place >= len(answer.times) else place] - story.started,
        got=answer.tokens[shown : shown + _SHOWN],
        wanted=wanted[shown : shown + _SHOWN],
        moved_after=bisect_left(answer.times, kills[0]) if kills else None,
    )


def _is_moved(answer: Answer, fault: Fault) -> bool:
    return answer.rank == fault.rank and answer.started < fault.at


def _longest_within(load: Load, since: float, until: float) -> float:
    gaps = [0.0]
    for answer in load.answers:
        for gap, end in zip(answer.gaps(), answer.times, strict=True):
            if end - gap >= since and end <= until:
                gaps.append(gap)
    return max(gaps)
