"""Groups that name ranks which are not there yet: they begin without them, and have them when they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import eep
from tests.process_group.collective_calls import values
from tests.process_group.members import MemberProgram, Members

Start = Callable[..., Members]


def split(member: MemberProgram, name: str, ranks: list[int], of: str = "world") -> bool:
    """Whether this rank is in the new group."""
    member.groups[name] = eep.pg.split(member.groups[of], ranks, name=name)
    return member.groups[name] is not None


def gather(member: MemberProgram, group: str) -> tuple[list[float], tuple[int, ...]]:
    pg = member.groups[group]
    outs = [torch.full((1,), 9.0) for _ in range(pg.size())]
    work = dist.all_gather(outs, torch.full((1,), float(member.rank)), group=pg, async_op=True)
    work.wait()
    return [out.item() for out in outs], eep.pg.answered(work)


def torch_group(member: MemberProgram, ranks: list[int]) -> None:
    dist.new_group(ranks)


def add(members: Members, rank: int, present: list[int], groups: dict[str, list[int]]) -> None:
    """Starts a rank that makes these groups, and lets it in."""
    newcomer = members.relaunch(rank, size=rank + 1)
    for name, ranks in groups.items():
        newcomer.call("do", split, name, ranks)
    newcomer.send("join")
    members.all(present, "recover", [rank])
    newcomer.answer()


def check_sums(members: Members, group: str, ranks: list[int], seed: int) -> None:
    wanted = torch.stack([values(seed, place, (5,), torch.float32) for place in range(len(ranks))]).sum(0)
    for (out,) in members.all(ranks, "run", "all_reduce", seed, group=group).values():
        assert torch.equal(out, wanted)


def test_a_rank_that_comes_is_in_the_groups_that_named_it(group: Start) -> None:
    members = group(2, max_ranks=4)
    assert members.all([0, 1], "do", split, "ends", [0, 2]) == {0: True, 1: False}
    assert members[0].call("do", gather, "ends") == ([0.0, 9.0], (0,))
    add(members, 2, [0, 1], {"ends": [0, 2]})
    for rank in (0, 2):
        assert members[rank].call("active", "ends") == (0, 1), "as ranks of the group"
    check_sums(members, "ends", [0, 2], 3)
    members[2].kill()
    members.all([0, 1], "deactivate", [2])
    assert members[0].call("do", gather, "ends") == ([0.0, 9.0], (0,))
    add(members, 2, [0, 1], {"ends": [0, 2]})
    check_sums(members, "ends", [0, 2], 4)


def test_a_group_that_named_all_ranks_there_are_grows_from_then_on(group: Start) -> None:
    members = group(2, max_ranks=4)
    members.all([0, 1], "do", split, "most", [0, 1, 2])
    members.all([0, 1], "do", split, "two", [0, 2])
    check_sums(members, "most", [0, 1], 1)
    add(members, 2, [0, 1], {"most": [0, 1, 2], "two": [0, 2]})
    check_sums(members, "most", [0, 1, 2], 2)
    add(members, 3, [0, 1, 2], {"most": [0, 1, 2, 3]})
    check_sums(members, "most", [0, 1, 2, 3], 3)
    check_sums(members, "two", [0, 2], 4)


def test_who_cannot_be_named(group: Start) -> None:
    members = group(2, max_ranks=3)
    for ranks in ([0, 3], [0, -1]):
        with pytest.raises(ValueError, match=r"there are 2 ranks, and never more than 3"):
            members[0].call("do", split, "beyond", ranks)
    members.all([0, 1], "do", split, "single", [0])
    with pytest.raises(ValueError, match="rank 1 is not in this group of 1"):
        members[0].call("do", split, "of_single", [0, 1], "single")
    with pytest.raises(ValueError, match="world_size"):  # torch's own words: its groups are of ranks that are there
        members[0].call("do", torch_group, [0, 2])
    members.all([0, 1], "run", "all_reduce", 1)
