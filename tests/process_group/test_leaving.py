"""A rank finishes its part of a call and leaves. One that comes to the call later finds that part all the same."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
import torch

import eep
from eep.process_group.lane import Lane
from eep.process_group.point_to_point import Messages
from eep.process_group.work import EepWork
from eep.view import View
from tests.process_group.collective_calls import values
from tests.process_group.members import Members
from tests.process_group.worlds import CALL_S, SOON, Worlds, enter

Start = Callable[..., Members]
FIRST = {"broadcast": 0, "scatter": 0, "reduce": 1, "gather": 1}
"""The rank that need not wait for the other, where rank 0 is the root."""


def leave(members: Members, rank: int, how: str) -> None:
    if how == "subgroup":
        members[rank].call("destroy_group", "pair")
        return
    members[rank].call("destroy")
    if how == "process":
        members[rank].kill()


@pytest.mark.parametrize("how", ["subgroup", "world", "process"])
@pytest.mark.parametrize("name", FIRST)
def test_its_part_of_a_collective_is_still_there(group: Start, name: str, how: str) -> None:
    members = group(2)
    members.all(range(2), "new_group", "pair", [0, 1])
    used = "pair" if how == "subgroup" else "world"
    first = FIRST[name]
    members[first].call("run", name, 3, group=used)
    leave(members, first, how)
    together = members[1 - first].call("run", name, 3, group=used)
    if name == "broadcast":
        assert torch.equal(together[0], values(3, 0, (5,), torch.float32))
    elif name == "reduce":
        assert torch.equal(together[0], sum(values(3, rank, (5,), torch.float32) for rank in range(2)))
    elif name == "gather":
        assert [part.tolist() for part in together] == [
            values(3, rank, (5,), torch.float32).tolist() for rank in range(2)
        ]
    if how == "subgroup":
        members.all(range(2), "run", "barrier", 1)
    with pytest.raises(eep.StepFailed):  # at once, and not when the time of the group is up
        members[1 - first].call("run", name, 4, group=used)


@pytest.mark.parametrize("how", ["subgroup", "world", "process"])
def test_its_messages_are_still_there(group: Start, how: str) -> None:
    members = group(2)
    members.all(range(2), "new_group", "pair", [0, 1])
    used = "pair" if how == "subgroup" else "world"
    for seed in (1, 2):
        members[0].call("send", 1, seed, group=used)
    leave(members, 0, how)
    for seed in (1, 2):
        source, tensor = members[1].call("recv", 0, group=used)
        assert source == 0
        assert torch.equal(tensor, values(seed, 0, (3,), torch.float32))
    with pytest.raises(eep.StepFailed, match="left"):
        members[1].call("recv", 0, group=used)
    with pytest.raises(eep.StepFailed):
        members[1].call("send", 0, 3, group=used)


def test_a_message_that_was_set_aside_is_there_for_who_asks_while_another_is_given(
    worlds: Callable[[int], Worlds], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worlds(2)
    ranks = [made.start(rank) for rank in range(2)]
    enter(ranks, View(1, (0, 1), (0, 0)))
    lanes = [world.open_lane("messages", range(2)) for world in ranks]
    source, destination = (Messages(world.endpoint, lane, CALL_S) for world, lane in zip(ranks, lanes, strict=True))
    for tag in range(3):
        source.send(torch.tensor([tag + 1.0]), 1, tag).wait(SOON)
    ranks[0].close()
    outs = torch.zeros(3, 1)
    destination.receive(outs[2], 0, 2).wait(SOON)  # the others are set aside
    asked: queue.SimpleQueue[EepWork] = queue.SimpleQueue()
    meanwhile = iter([outs[1]])

    def left(members: int) -> int:
        for tensor in meanwhile:
            asked.put(destination.receive(tensor, 0, 1))
        return Lane.left(lanes[1], members)

    monkeypatch.setattr(lanes[1], "left", left)
    destination.receive(outs[0], 0, 0).wait(SOON)
    asked.get(timeout=CALL_S).wait(SOON)  # the receiver asks after it has delivered, and so perhaps after this rank
    assert outs[:, 0].tolist() == [1.0, 2.0, 3.0]
