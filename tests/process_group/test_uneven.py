"""reduce_scatter of blocks that differ in size: when ranks are missing, and when the members disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import eep
from tests.process_group.collective_calls import UNEVEN, values
from tests.process_group.members import MemberProgram, Members

Start = Callable[..., Members]


def block_of(rank: int, seed: int, ranks: list[int], size: int) -> torch.Tensor:
    """What ``rank`` gets of ``ranks`` in a group of ``size``."""
    return torch.stack([values(seed + 7, r * size + rank, (rank + 1, 2), torch.float32) for r in ranks]).sum(0)


def scatter(member: MemberProgram, sizes: list[int], out: int, in_background: bool = False) -> list[float]:
    tensor = torch.zeros(out)
    work = dist.reduce_scatter(tensor, [torch.ones(size) for size in sizes], async_op=in_background)
    if in_background:
        work.wait()
        assert work.result()[0] is tensor
    return tensor.tolist()


def test_over_the_survivors(group: Start) -> None:
    members = group(3)
    for rank, (out,) in members.all(range(3), "run", UNEVEN, 1, shape=(2,)).items():
        assert torch.equal(out, block_of(rank, 1, [0, 1, 2], 3))
    members[1].kill()
    members.all([0, 2], "deactivate", [1])
    for rank, (out,) in members.all([0, 2], "run", UNEVEN, 2, shape=(2,)).items():
        assert torch.equal(out, block_of(rank, 2, [0, 2], 3))
    members.rejoin(1, [0, 2])
    for rank, (out,) in members.all(range(3), "run", UNEVEN, 3, shape=(2,)).items():
        assert torch.equal(out, block_of(rank, 3, [0, 1, 2], 3))


def test_in_the_background_and_with_an_empty_block(group: Start) -> None:
    outs = group(2).all(range(2), "do", scatter_own, [0, 3])
    assert outs == {0: [], 1: [2.0] * 3}


def scatter_own(member: MemberProgram, sizes: list[int]) -> list[float]:
    return scatter(member, sizes, sizes[member.rank], in_background=True)


def test_a_death_is_told_by_the_name_of_the_call(group: Start) -> None:
    members = group(2)
    members[1].kill()
    with pytest.raises(eep.EpochRevoked, match=r"^reduce_scatter cannot be trusted: .* rank 1 has died") as error:
        members[0].call("do", scatter, [1, 2], 1)
    assert error.value.ranks == (1,)


def test_an_output_of_another_size_than_its_block_is_refused(group: Start) -> None:
    members = group(2)
    with pytest.raises(ValueError, match="the block of this rank has 1 elements, its output 2"):
        members[0].call("do", scatter, [1, 2], 2)
    members.all(range(2), "run", "all_reduce", 3)


def test_a_member_whose_block_has_another_size_elsewhere_is_told(group: Start) -> None:
    members = group(2)
    members[0].send("do", scatter, [1, 2], 1)
    members[1].send("do", scatter, [1, 3], 3)
    assert members[0].answer() == [2.0]
    with pytest.raises(ValueError, match=r"rank 0\b"):
        members[1].answer()
    members.all(range(2), "run", "all_reduce", 3)
