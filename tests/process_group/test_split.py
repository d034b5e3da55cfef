"""Groups of ``eep.pg.split`` are groups to torch: its functions take them, with global ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import eep
from tests.process_group.members import MemberProgram, Members
from tests.process_group.test_later_ranks import add, split

Start = Callable[..., Members]


def use(member: MemberProgram, group: str) -> tuple[list[int], list[float]]:
    """Its ranks, and what each of torch's calls gives that takes a global rank: the last two ranks have the group."""
    pg = member.groups[group]
    first, second = dist.get_process_group_ranks(pg)
    shared, total, message = (torch.full((1,), float(member.rank)) for _ in range(3))
    dist.broadcast(shared, src=second, group=pg)
    dist.reduce(total, dst=second, group=pg)
    if member.rank == first:
        dist.send(message, dst=second, group=pg)
    else:
        dist.recv(message, src=first, group=pg)
    assert dist.get_group_rank(pg, second) == 1
    assert dist.get_global_rank(pg, 0) == first
    return [first, second], [shared.item(), message.item(), total.item()]


def ranks_of(member: MemberProgram, group: str) -> list[int]:
    return dist.get_process_group_ranks(member.groups[group])


def shut_down(member: MemberProgram, group: str) -> None:
    """As torch does, but without telling it."""
    member.groups.pop(group).shutdown()


def call(member: MemberProgram, group: str) -> None:
    member.groups[group].barrier().wait()


def test_torchs_calls_take_global_ranks(group: Start) -> None:
    members = group(3)
    members.all([1, 2], "do", split, "pair", [1, 2])
    used = members.all([1, 2], "do", use, "pair")
    assert used[1][0] == [1, 2]
    assert used[1][1][:2] == [2.0, 1.0]
    assert used[2] == ([1, 2], [2.0, 1.0, 3.0])


@pytest.mark.parametrize("end", ["destroyed", "shut down"])
def test_the_name_of_one_that_has_ended_is_free(group: Start, end: str) -> None:
    members = group(3)
    for _ in range(2):
        members.all([1, 2], "do", split, "pair", [1, 2])
        assert members.all([1, 2], "do", use, "pair")[2][1] == [2.0, 1.0, 3.0]
        if end == "destroyed":
            members.all([1, 2], "destroy_group", "pair")
        else:
            members.all([1, 2], "do", shut_down, "pair")


@pytest.mark.parametrize("name", ["pair", "!"])
def test_it_ends_with_the_default_group(group: Start, name: str) -> None:
    """Torch ends groups in the order of their names: some after the default group."""
    members = group(2)
    members.all([0, 1], "do", split, name, [0, 1])
    members.all([0, 1], "destroy")
    for rank in range(2):
        with pytest.raises(eep.EepError, match="was destroyed"):
            members[rank].call("do", call, name)


def test_torch_knows_ranks_that_come_later(group: Start) -> None:
    members = group(2, max_ranks=3)
    members.all([0, 1], "do", split, "every", [0, 1])
    members.all([0, 1], "do", split, "ends", [0, 2])
    assert members[0].call("do", ranks_of, "ends") == [0, 2]
    add(members, 2, [0, 1], {"every": [0, 1, 2], "ends": [0, 2]})
    assert set(map(tuple, members.all(range(3), "do", ranks_of, "every").values())) == {(0, 1, 2)}
