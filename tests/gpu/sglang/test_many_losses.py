"""Several ranks of a server on a GPU are lost at once, and many one after the other: nothing grows."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterable

import pytest

from eep.drill.story import Story
from tests.sglang.drills import Drilled, descriptors, wait_for_answers

pytestmark = pytest.mark.timeout(900)

ROUNDS = 17
"""In each, all ranks but one are lost: a kill more than fifty."""
UNEVEN_MIB = 512
"""What the memory of the device may differ by: four processes allocate workspaces when they first need them."""


def device_memory_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def usual_gap(story: Story) -> float:
    return statistics.median(gap for answer in story.load.answers for gap in answer.gaps())


def calm(drilled: Drilled, seconds: float = 5.0) -> Story:
    """Load without faults, when everything is there again that takes memory of the device."""
    story = drilled.story(clients=16)
    assert len(story.target.wait_for_spares(drilled.ranks)) == drilled.ranks
    with story.load:
        time.sleep(seconds)  # gaps between tokens are measured for so long
    drilled.check(story)
    return story


def lose(drilled: Drilled, story: Story, lost: Iterable[int]) -> None:
    """And have them back."""
    lives = {rank: story.target.ranks()[rank].incarnation for rank in lost}
    for rank in lives:
        story.kill(rank)
    assert story.wait_until_back(drilled.ranks, lives), drilled.server.log[-3000:]


@pytest.mark.parametrize("lost", [(0, 2), (0, 1, 3)], ids=["two", "three"])
def test_several_at_once(roomy: Drilled, lost: tuple[int, ...]) -> None:
    story = roomy.story(clients=16)
    with story.load:
        wait_for_answers(story.load)
        lose(roomy, story, lost)
    roomy.check(story)


def test_fifty_kills_leave_everything_as_it_was(roomy: Drilled) -> None:
    before = usual_gap(calm(roomy))
    story = roomy.story(clients=16)
    will_be_ranks = story.target.spares()
    memory, opened = device_memory_mib(), descriptors(roomy.server)
    with story.load:
        for number in range(ROUNDS):
            lose(roomy, story, [rank for rank in range(roomy.ranks) if rank != number % roomy.ranks])
            wait_for_answers(story.load)
    last, first = story.faults[-1], story.faults[0]
    print(f"{len(story.faults)} kills in {last.at - first.at:.0f} s, {len(story.load.answers)} answers")
    roomy.check(story)
    after = usual_gap(calm(roomy))
    grown = device_memory_mib() - memory
    stayed = opened.keys() - will_be_ranks
    more = {pid: count - opened[pid] for pid, count in descriptors(roomy.server).items() if pid in stayed}
    print(f"token gap {before * 1e3:.2f} ms before and {after * 1e3:.2f} ms after, device memory {grown:+} MiB")
    assert grown < UNEVEN_MIB
    assert max(more.values()) < len(story.faults) / 2, f"descriptors that processes have opened and not closed: {more}"
    assert after < 2 * before
