"""Names of groups that are used again, and news that come late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import eep
from eep.data_plane.endpoint import Endpoint
from eep.process_group import calls
from eep.process_group.lane import Lane
from eep.process_group.runner import Runner
from eep.process_group.world import World
from eep.view import View
from tests.process_group.worlds import CALL_S, SOON, Worlds, enter, queue_sum, sums, together

Make = Callable[[int], Worlds]


def lane_of(world: World) -> Lane:
    return world.open_lane("group", range(world.size))


def runner_of(world: World) -> Runner:
    return Runner("group", {"cpu": lane_of(world)})


def start(worlds: Make, size: int) -> list[World]:
    made = worlds(size)
    ranks = [made.start(rank) for rank in range(size)]
    enter(ranks, View(1, tuple(range(size)), (0,) * size))
    return ranks


def broadcast(lane: Lane, value: float, timeout: float = 1.0) -> float:
    """From rank 0, which need not wait for the others."""
    tensor = torch.tensor([value])
    lane.call("broadcast", calls.broadcast(tensor, 0).args, timeout)
    return tensor.item()


def test_a_name_that_is_used_again_is_that_of_another_group(worlds: Make) -> None:
    """A rank that comes late to the first finds what was said there, and not what was said in the second and third."""
    fast, slow = start(worlds, 2)
    late = lane_of(slow)
    broadcast(lane_of(fast), 1.0, CALL_S)
    for value in (2.0, 3.0):
        fast.close_lanes("group")
        with contextlib.suppress(eep.StepFailed):  # the other is not there
            broadcast(lane_of(fast), value)
    assert broadcast(late, 0.0) == 1.0


def test_groups_of_one_name_may_follow_each_other_within_a_view(worlds: Make) -> None:
    """Each rank goes on as it comes: no rank waits between two of them."""
    ranks = start(worlds, 2)
    found: dict[int, list[float]] = {0: [], 1: []}

    def turns(rank: int) -> None:
        for turn in range(1, 50):
            tensor = torch.tensor([float(turn * (10 if rank else 1))])
            queue_sum(runner_of(ranks[rank]), tensor).wait(SOON)
            found[rank].append(tensor.item())
            ranks[rank].close_lanes("group")

    together([lambda: turns(0), lambda: turns(1)])
    assert found[0] == found[1] == [11.0 * turn for turn in range(1, 50)]


def test_a_group_too_many_is_told_what_to_do_and_takes_no_place(worlds: Make) -> None:
    (world,) = start(worlds, 1)
    for name in "abcd":
        world.open_lane(name, [0])
    for _ in range(2):
        with pytest.raises(eep.EepError, match=r"'e': all 4 places .* destroy a group .*Options\(lanes=...\)"):
            world.open_lane("e", [0])
    world.close_lanes("b")
    world.open_lane("e", [0])


def test_a_joiner_finds_a_group_that_the_others_have_made_again(worlds: Make) -> None:
    """However often each has made it before: in the next view a name means the same to all."""
    made = worlds(3)
    members, joiner = [made.start(rank) for rank in (0, 1)], made.start(2)
    enter(members, View(1, (0, 1), (0, 0, -1)))
    joiner.start_alone()
    for world, times in ((members[0], 2), (members[1], 2), (joiner, 1)):
        for _ in range(times):
            lane_of(world)
            world.close_lanes("group")
    runners = [runner_of(world) for world in (*members, joiner)]
    assert sums(runners[:2], [1.0, 2.0]) == [3.0, 3.0]
    assert sums(runners[2:], [4.0]) == [4.0]
    enter([*members, joiner], View(2, (0, 1, 2), (0, 0, 0)))
    assert sums(runners, [1.0, 2.0, 4.0]) == [7.0] * 3


def test_the_news_of_a_rank_that_left_do_not_harm_its_next_life(worlds: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come while the view is entered that has the next one."""
    made = worlds(2)
    here, first = made.start(0), made.start(1)
    enter([here, first], View(1, (0, 1), (0, 0)))
    first.close()
    second = made.start(1)
    has_left = here.endpoint.has_left

    def see_then_enter(rank: int) -> bool:
        seen = has_left(rank)
        enter([here, second], View(2, (0, 1), (0, 1)))
        return seen

    monkeypatch.setattr(here.endpoint, "has_left", see_then_enter)
    here._ended((1, 0))
    assert here.endpoint.is_ok, str(here.endpoint.status())
    assert sums([runner_of(here), runner_of(second)], [1.0, 2.0]) == [3.0, 3.0]


def test_a_rank_that_left_spoils_nothing_and_is_not_waited_for(worlds: Make) -> None:
    here, other = start(worlds, 2)
    lane = lane_of(here)
    other.close()
    here._ended((1, 0))
    assert here.endpoint.is_ok
    with pytest.raises(eep.StepFailed, match="no answer from rank 1"):
        broadcast(lane, 1.0, CALL_S)


def test_a_name_is_not_used_again_within_a_view_on_a_device(worlds: Make, tmp_path: Path) -> None:
    """What was captured there would not follow the group into the next view. The device is made up."""
    made = worlds(2)
    ranks = [made.start(rank) for rank in (0, 1)]
    for world in ranks:
        world._endpoints["cuda"] = Endpoint(world.rank, world.endpoint.shape, rendezvous=tmp_path)
    world = ranks[0]
    world.start_alone()
    for _ in range(2):  # alone it may
        world.open_lane("group", range(2), "cuda")
        world.close_lanes("group")
    enter(ranks, View(1, (0, 1), (0, 0)))
    world.open_lane("group", range(2), "cuda")
    world.close_lanes("group")
    for device in ("cpu", "cuda"):
        with pytest.raises(eep.EepError, match="another name"):
            world.open_lane("group", range(2), device)
    world.open_lane("other", range(2), "cuda")
    enter([world], View(2, (0,), (0, 0)))
    world.open_lane("group", range(2), "cuda")
