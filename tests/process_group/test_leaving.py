"""A rank finishes its part of a call and leaves. One that comes to the call later finds that part all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import eep
from tests.process_group.collective_calls import values
from tests.process_group.members import Members

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
