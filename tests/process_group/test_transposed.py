"""Tensors whose elements lie in another order than that of their dimensions, or with gaps. Gloo says what comes out of them;
here is what it cannot be asked: layouts that differ from rank to rank, ranks that are missing, and calls that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import eep
from eep.process_group import calls
from eep.process_group.call import check
from tests.process_group.collective_calls import MOVES, REDUCTIONS, all_gather_single, values
from tests.process_group.members import MemberProgram, Members

Start = Callable[..., Members]
SHAPE = (2, 3)
FLOAT = torch.float32


def gather(member: MemberProgram, size: int) -> list[torch.Tensor]:
    outs = [torch.full((3, 2), 9.0).t() for _ in range(size)]
    dist.all_gather(outs, values(1, member.rank, SHAPE, FLOAT))
    return outs


def sum_in_vain(member: MemberProgram) -> tuple[torch.Tensor, str]:
    tensor = torch.arange(6.0).view(3, 2).t()
    try:
        dist.all_reduce(tensor)
    except eep.StepFailed as error:
        return tensor, type(error).__name__
    return tensor, ""


def future_of_sum(member: MemberProgram) -> bool:
    tensor = torch.ones(3, 2).t()
    (given,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    return given is tensor and bool((tensor == 2).all())


def send(member: MemberProgram) -> None:
    dist.send(torch.ones(3, 2).t(), 1)


@pytest.mark.parametrize("name", MOVES + REDUCTIONS)
def test_each_rank_may_lay_out_its_tensors_as_it_likes(group: Start, name: str) -> None:
    members = group(2)
    wanted = members.all(range(2), "run", name, 5, shape=SHAPE)
    for rank in range(2):
        members[rank].send("run", name, 5, shape=SHAPE, layout=("contiguous", "transposed")[rank])
    for rank in range(2):
        for out, tensor in zip(members[rank].answer(), wanted[rank], strict=True):
            assert torch.equal(out, tensor)


def test_blocks_of_missing_ranks_keep_what_they_had(group: Start) -> None:
    members = group(3)
    members[1].kill()
    members.all([0, 2], "deactivate", [1])
    for outs in members.all([0, 2], "do", gather, 3).values():
        assert torch.equal(outs[1], torch.full(SHAPE, 9.0))
        assert torch.equal(outs[2], values(1, 2, SHAPE, FLOAT))


def test_a_call_that_fails_writes_nothing(group: Start) -> None:
    members = group(2)
    members[1].kill()
    tensor, trouble = members[0].call("do", sum_in_vain)
    assert trouble == "EpochRevoked"
    assert torch.equal(tensor, torch.arange(6.0).view(3, 2).t())


def test_the_future_has_the_tensor_of_the_caller(group: Start) -> None:
    assert group(2).all(range(2), "do", future_of_sum) == {0: True, 1: True}


def test_messages_are_contiguous_as_those_of_gloo(group: Start) -> None:
    with pytest.raises(ValueError, match=r"send: the tensor of a message must be contiguous"):
        group(2)[0].call("do", send)


def test_which_layouts_are_taken() -> None:
    whole = torch.zeros(2, 3, 4, 5)
    for taken in (whole, whole.permute(3, 1, 0, 2), whole[:, 1:].mT, whole[..., ::2], torch.zeros(3, 1).expand(3, 4)):
        check("all_reduce", taken)
    with pytest.raises(ValueError, match="must be contiguous; call"):
        check("all_reduce", torch.zeros(2, 3, device="meta").t())  # as on a GPU


def test_elements_that_share_memory_are_read_and_not_written() -> None:
    expanded = torch.tensor([5.0]).expand(3)
    calls.all_gather([torch.zeros(3)], expanded)
    with pytest.raises(ValueError, match="share memory"):
        calls.broadcast(expanded, 0)


def test_a_parameter(group: Start) -> None:
    assert group(2).all(range(2), "do", broadcast_parameter) == {0: [1.0] * 6, 1: [1.0] * 6}


def broadcast_parameter(member: MemberProgram) -> list[float]:
    parameter = torch.nn.Parameter(torch.full((3, 2), member.rank + 1.0).t())
    dist.broadcast(parameter, 0)
    return parameter.flatten().tolist()


def test_an_input_is_not_written(group: Start) -> None:
    """It may be in memory that others read, or that cannot be written."""
    assert group(2).all(range(2), "do", versions_of_an_input) == {0: [0, 1], 1: [0, 1]}


def versions_of_an_input(member: MemberProgram) -> list[int]:
    tensor, out = torch.ones(3, 2).t(), torch.zeros(3, 4).t()
    all_gather_single(out, tensor)
    return [tensor._version, out._version]
