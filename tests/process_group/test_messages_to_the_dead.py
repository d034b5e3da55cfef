"""A message to a rank that has just died is not said to be sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import eep
from tests.process_group.collective_calls import values
from tests.process_group.members import MemberProgram, Members

Start = Callable[..., Members]


def watch_no_more(member: MemberProgram) -> None:
    """As if the thread that watches the peers had no time yet."""
    member.groups["world"].world._watch.follow({})


def send_once(member: MemberProgram, to: int, length: int = 1) -> tuple[str, tuple[int, ...]]:
    """How it ended, and who is blamed."""
    try:
        dist.send(torch.ones(length), to)
    except eep.StepFailed as error:
        return type(error).__name__, error.ranks
    return "", ()


def test_the_send_itself_tells(group: Start) -> None:
    members = group(3)
    members[0].call("send", 1, 1)  # so that the way is known
    members[0].call("do", watch_no_more)
    members[1].kill()
    assert members[0].call("do", send_once, 1) == ("EpochRevoked", (1,))
    members.all([0, 2], "deactivate", [1])
    members[0].call("send", 2, 2)
    assert torch.equal(members[2].call("recv", 0)[1], values(2, 0, (3,), torch.float32))


def test_the_next_send_to_any_rank_tells_of_one_that_died_after_its_own(group: Start) -> None:
    members = group(3)
    members[0].call("do", watch_no_more)
    members[0].call("send", 1, 1)
    members[1].kill()
    assert members[0].call("do", send_once, 2) == ("EpochRevoked", (1,))


def test_a_collective_that_needs_nothing_of_the_dead_tells_too(group: Start) -> None:
    members = group(3)
    members.all(range(3), "run", "broadcast", 1)
    members[0].call("do", watch_no_more)
    members[0].call("send", 1, 1)
    members[1].kill()
    with pytest.raises(eep.EpochRevoked, match="rank 1 has died"):
        members[0].call("run", "broadcast", 2)  # as its root, which waits for no one


@pytest.mark.parametrize("length", [1, 100_000])
def test_one_that_is_under_way_when_its_destination_dies(group: Start, length: int) -> None:
    """The longer one waits for room in the pipe, the shorter one is followed by others until there is none."""
    members = group(2)
    members[0].send("do", send_many, 1, length)
    members[1].call("recv", 0, length)
    members[1].kill()
    assert members[0].answer() == ("EpochRevoked", (1,))


def send_many(member: MemberProgram, to: int, length: int) -> tuple[str, tuple[int, ...]]:
    while (told := send_once(member, to, length)) == ("", ()):
        pass
    return told
