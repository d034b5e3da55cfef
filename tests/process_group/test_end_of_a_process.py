"""How a process ends that is in a group, and what a fork of it must leave alone."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from eep.process_group.callback_threads import callbacks
from tests.process_group.collective_calls import values
from tests.process_group.members import MemberProgram, Members, wait_until
from tests.process_group.worlds import SOON

Start = Callable[..., Members]
ENDS = ("exit", "destroy", "destroy a subgroup")


def fork(member: MemberProgram, ends: str) -> int:
    """How a fork of the member ended."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            if ends == "exit":
                atexit._run_exitfuncs()
            elif ends == "destroy":
                dist.destroy_process_group()
            else:
                member.groups["pair"].shutdown()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("ends", ENDS)
def test_a_fork_that_ends_does_not_end_its_parent_as_a_rank(group: Start, ends: str) -> None:
    members = group(2)
    members.all(range(2), "new_group", "pair", [0, 1])
    assert members[0].call("do", fork, ends) == 0
    assert members[1].call("peer_state", [0]) == ["active"]
    for used in ("pair", "world"):
        members[1].send("recv", 0, group=used)
        members[0].call("send", 1, 4, group=used)
        assert torch.equal(members[1].answer()[1], values(4, 0, (3,), torch.float32))
        for (total,) in members.all(range(2), "run", "all_reduce", 3, group=used).values():
            assert torch.equal(total, sum(values(3, rank, (5,), torch.float32) for rank in range(2)))


def run_callback_in_fork(member: MemberProgram) -> int:
    callbacks.run(lambda: None)
    wait_until(lambda: bool(callbacks._idle))  # there is a thread that the fork will not have
    if (child := os.fork()) == 0:
        ran = threading.Event()
        callbacks.run(ran.set)
        os._exit(0 if ran.wait(SOON.total_seconds()) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_callbacks_run_in_a_fork(group: Start) -> None:
    assert group(1)[0].call("do", run_callback_in_fork) == 0


def test_a_process_of_multiprocessing_leaves_when_its_program_ends(group: Start) -> None:
    members = group(2)
    members[1].call("send", 0, 5)
    members[1]._connection.close()  # it returns from its function
    members[1].wait_until_dead()
    assert members[0].call("peer_state", [1]) == ["left"]
    assert torch.equal(members[0].call("recv", 1)[1], values(5, 1, (3,), torch.float32))
