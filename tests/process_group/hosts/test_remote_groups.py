"""Groups over ranks of several hosts, whose views are given: every collective, messages, losses and returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import eep
from tests.process_group.collective_calls import COLLECTIVES, UNEVEN, values
from tests.process_group.hosts.host_members import HostMembers
from tests.process_group.members import GroupConfig, members

Start = Callable[..., HostMembers]


@pytest.mark.parametrize("provider", ["tcp", "tcp;ofi_rxm"])
def test_every_collective_gives_what_gloo_gives(hosts: Start, tmp_path: Path, provider: str) -> None:
    ours = hosts(0, 0, 1, provider=provider, chunk_bytes=1 << 16)
    with members(tmp_path / "gloo", GroupConfig(3, backend="gloo")) as theirs:
        for name in (*COLLECTIVES, UNEVEN):
            for length in (5, 50_000):
                got, wanted = (group.all(range(3), "run", name, 3, shape=(length,), root=1) for group in (ours, theirs))
                for rank in range(3):
                    assert len(got[rank]) == len(wanted[rank])
                    assert all(map(torch.equal, got[rank], wanted[rank])), (name, length, rank)


def test_messages_cross(hosts: Start) -> None:
    group = hosts(0, 1)
    for length in (1, 100_000):
        group[1].send("recv", 0, length)
        group[0].call("send", 1, 4, length)
        source, got = group[1].answer()
        assert source == 0
        assert torch.equal(got, values(4, 0, (length,), torch.float32))
    outs = group.all([0, 1], "run", "all_reduce", 9)
    assert torch.equal(outs[0][0], outs[1][0])


def test_a_killed_rank_of_another_host_ends_what_waits_for_it(hosts: Start) -> None:
    group = hosts(0, 0, 1)
    for rank in (0, 1):
        group[rank].send("run_until_trouble", "all_reduce", 1, shape=(10_000,))
    group[2].kill()
    for rank in (0, 1):
        _, trouble = group[rank].answer()
        assert trouble in ("EpochRevoked", "StepFailed")
        assert group[rank].call("dead_ranks") == (2,)
    group.enter([0, 1])
    for out in group.all([0, 1], "run", "all_reduce", 5).values():
        assert torch.equal(out[0], values(5, 0, (5,), torch.float32) + values(5, 1, (5,), torch.float32))
    group.replace(2, [0, 1])
    wanted = sum(values(6, rank, (5,), torch.float32) for rank in range(3))
    for out in group.all(range(3), "run", "all_reduce", 6).values():
        assert torch.equal(out[0], wanted)


def test_a_rank_that_leaves_spoils_nothing_that_it_had_finished(hosts: Start) -> None:
    group = hosts(0, 1)
    group[1].send("run_and_destroy", 3)
    # It has said goodbye, and closed its link, before this rank comes to the call.
    first = group[0].call("run", "all_reduce", 3, shape=(50_000,))[0]
    assert torch.equal(first, sum(values(3, rank, (50_000,), torch.float32) for rank in (0, 1)))
    group[1].answer()
    with pytest.raises(eep.StepFailed):
        group[0].call("run", "all_reduce", 4)
