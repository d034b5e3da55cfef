"""The timers of a supervisor: one that is for a life or an epoch that is over does not stay until it fires."""

from __future__ import annotations

import asyncio

from eep.control.supervisor.timers import DeadlineTimers
from eep.membership import Deadline, Event, SetTimer, Timer


def fired(*deadlines: Deadline) -> list[Event]:
    """Those that fire, of deadlines that are set one after the other."""

    async def run() -> list[Event]:
        seen: list[Event] = []
        over = asyncio.Event()
        timers = DeadlineTimers(lambda event: over.set() if event is last else seen.append(event))
        for deadline in deadlines:
            timers.set(SetTimer(deadline, 0.0))
        last = Deadline(Timer.JUDGE, 10**6)
        timers.set(SetTimer(last, 0.01))
        await asyncio.wait_for(over.wait(), 30)
        return seen

    return asyncio.run(run())


def test_the_next_life_of_a_rank_takes_the_place_of_the_one_before() -> None:
    deadlines = [Deadline(Timer.START, life, 1) for life in range(1000)]
    assert fired(*deadlines) == deadlines[-1:]


def test_other_ranks_and_other_timers_are_not_touched() -> None:
    deadlines = [Deadline(Timer.START, 0, 1), Deadline(Timer.START, 5, 2), Deadline(Timer.FENCE, 5, 1)]
    assert fired(*deadlines) == deadlines


def test_a_timer_that_is_set_again_for_the_same_life_does_not_put_off_the_first() -> None:
    deadlines = [Deadline(Timer.STABLE, 3, 1)] * 2
    assert fired(*deadlines) == deadlines
