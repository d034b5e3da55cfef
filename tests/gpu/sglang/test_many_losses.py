"""Several ranks of a server on a GPU are lost at once, and many one after the other: nothing grows."""

from __future__ import annotations

import statistics
import subprocess
import time
from itertools import islice

import pytest

from eep.drill.story import Story
from tests.sglang.drills import Drilled, descriptors

pytestmark = pytest.mark.timeout(900)

KILLS, PACE, LONGEST_DRILL = 50, 3.0, 420.0
UNEVEN_MIB = 512
"""What the memory of the device may differ by: four processes allocate workspaces when they first need them."""


def device_memory_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def usual_gap(story: Story) -> float:
    return statistics.median(gap for answer in story.load.answers for gap in answer.gaps())


def calm(drilled: Drilled, seconds: float = 5.0) -> Story:
    story = drilled.story(clients=16)
    with story.load:
        time.sleep(seconds)
    drilled.check(story)
    return story


@pytest.mark.parametrize("lost", [(0, 2), (0, 1, 3)], ids=["two", "three"])
def test_several_at_once(roomy: Drilled, lost: tuple[int, ...]) -> None:
    story = roomy.story(clients=16)
    with story.load:
        time.sleep(1.0)
        lives = {rank: story.target.ranks()[rank].incarnation for rank in lost}
        for rank in lost:
            story.kill(rank)
        assert story.wait_until_back(roomy.ranks, lives), roomy.server.log[-3000:]
    roomy.check(story)


def test_fifty_kills_leave_everything_as_it_was(roomy: Drilled) -> None:
    before = usual_gap(calm(roomy))
    memory, opened = device_memory_mib(), descriptors(roomy.server)
    story = roomy.story(clients=16)
    with story.load:
        kills = list(islice(story.target.drill(LONGEST_DRILL, PACE, seed=20261115, most=2), KILLS))
    print(f"{len(kills)} kills in {kills[-1][0] - kills[0][0]:.0f} s, {len(story.load.answers)} answers")
    roomy.check(story)
    assert len(kills) == KILLS
    after = usual_gap(calm(roomy))
    grown = device_memory_mib() - memory
    more = {pid: count - opened[pid] for pid, count in descriptors(roomy.server).items() if pid in opened}
    print(f"token gap {before * 1e3:.2f} ms before and {after * 1e3:.2f} ms after, device memory {grown:+} MiB")
    assert grown < UNEVEN_MIB
    assert max(more.values()) < KILLS / 2, f"descriptors that processes have opened and not closed: {more}"
    assert after < 2 * before
