"""Ranks of several hosts without a supervisor: they find each other through torch's store, lose each other and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import eep
from tests.process_group.collective_calls import values
from tests.process_group.hosts.host_members import StoreMembers
from tests.process_group.members import wait_until

Start = Callable[..., StoreMembers]


def check_sum(members: StoreMembers, seed: int, ranks: Sequence[int]) -> None:
    wanted = torch.stack([values(seed, rank, (5,), torch.float32) for rank in ranks]).sum(0)
    for out in members.all(ranks, "run", "all_reduce", seed).values():
        assert torch.equal(out[0], wanted)


def test_a_lost_rank_of_another_host_is_left_out_and_comes_back(agreeing: Start) -> None:
    members = agreeing(0, 0, 1)
    check_sum(members, 1, range(3))
    for rank in (0, 1):
        members[rank].send("run_until_trouble", "all_reduce", 2)
    members[2].kill()
    for rank in (0, 1):
        assert members[rank].answer()[1] in ("EpochRevoked", "StepFailed")
    # Rank 1 may have seen the end of its own link first, and revoked the view for rank 0 too.
    wait_until(lambda: members[0].call("peer_state", [2]) == ["dead"])
    for view in members.all([0, 1], "deactivate", [2]).values():
        assert view.active == (0, 1)
    check_sum(members, 3, [0, 1])
    assert members[0].call("peer_state", [2]) == ["absent"]
    members.rejoin(2, [0, 1])
    assert members[0].call("active") == (0, 1, 2)
    check_sum(members, 4, range(3))
    members.all(range(3), "destroy")


def test_a_rank_is_added_on_another_host(agreeing: Start) -> None:
    members = agreeing(0, 1, 1, size=2, max_ranks=3)
    members.relaunch(2, size=3).send("join")
    members.all([0, 1], "recover", [2])
    members[2].answer()
    check_sum(members, 4, range(3))


def test_a_joiner_that_does_not_wait_changes_nothing(agreeing: Start) -> None:
    members = agreeing(0, 1)
    members[1].kill()
    members[0].call("deactivate", [1])
    with pytest.raises(eep.PeerUnreachable, match="nothing has changed"):
        members[0].call("recover", [1], timeout=0.4)
    assert members[0].call("active") == (0,)
    members.rejoin(1, [0])
    check_sum(members, 5, range(2))


def test_another_key_is_told(agreeing: Start) -> None:
    members = agreeing(0, 1, begins=False, timeout_ms=10_000)
    members.start(range(2))
    errors = []
    for rank, key in ((0, b"k" * 32), (1, b"x" * 32)):
        members[rank].send("start", key=key)
    for rank in (0, 1):
        with pytest.raises(eep.EepError) as error:
            members[rank].answer()
        errors.append(str(error.value))
    # The first to look is told. Its record may be gone before the other looks.
    assert any("was not made with the key of this job" in error for error in errors)
