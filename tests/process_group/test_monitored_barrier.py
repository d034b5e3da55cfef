"""A barrier that names the ranks that do not come, with the words of gloo's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
from tests.process_group.members import GroupConfig, MemberProgram, Members, members

Start = Callable[..., Members]
SIZE = 3
PATIENCE_S = 20.0


def pass_barrier(
    member: MemberProgram, seconds: float = PATIENCE_S, wait_all: bool = False, times: int = 1, group: str = "world"
) -> list[str]:
    """What each of so many barriers said, "" for one that was passed."""
    told = []
    for _ in range(times):
        try:
            member.groups[group].monitored_barrier(timedelta(seconds=seconds), wait_all)
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told


def blame(member: MemberProgram, seconds: float) -> tuple[str, tuple[int, ...]]:
    try:
        eep.pg.monitored_barrier(timeout=timedelta(seconds=seconds))
    except eep.StepFailed as error:
        return type(error).__name__, error.ranks
    return "", ()


def times_in_barrier(member: MemberProgram, late: float) -> tuple[float, float]:
    time.sleep(late)
    begin = time.monotonic()
    member.groups["world"].monitored_barrier(timedelta(seconds=PATIENCE_S))
    return begin, time.monotonic()


def torchs_own(member: MemberProgram, seconds: float, wait_all: bool = False) -> str:
    """What the barrier said that programs call, "" if it was passed."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=seconds), wait_all_ranks=wait_all)
    except RuntimeError as error:
        return str(error)
    return ""


def of_another_backend(member: MemberProgram) -> None:
    eep.pg.monitored_barrier()


@pytest.fixture(params=["eep", "gloo"])
def either(request: Any, tmp_path: Path) -> Iterator[Members]:
    with members(tmp_path / "ranks", GroupConfig(SIZE, backend=request.param)) as started:
        yield started


def test_all_pass_and_none_before_the_last_has_come(either: Members) -> None:
    assert set(map(tuple, either.all(range(SIZE), "do", pass_barrier, times=5).values())) == {("",) * 5}
    for rank in range(SIZE):
        either[rank].send("do", times_in_barrier, 0.5 * (rank == 2))
    begins, ends = zip(*(either[rank].answer() for rank in range(SIZE)), strict=True)
    assert min(ends) >= max(begins)


def test_the_rank_that_does_not_come_is_named(either: Members) -> None:
    told = {rank: either[rank].send("do", pass_barrier, 1.5) for rank in (0, 2)}
    told = {rank: either[rank].answer()[0] for rank in (0, 2)}
    assert re.search(r"Rank 1 failed to pass monitoredBarrier in 1500 ms", told[0])
    assert "Rank 2 successfully reached monitoredBarrier, but received errors while waiting" in told[2]


def test_all_that_do_not_come_are_named(either: Members) -> None:
    (told,) = either[0].call("do", pass_barrier, 0.2, wait_all=True)
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms" in told


def test_torchs_own_name_will_do(either: Members) -> None:
    assert set(either.all(range(SIZE), "do", torchs_own, PATIENCE_S).values()) == {""}
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in either[0].call("do", torchs_own, 0.2, wait_all=True)


def test_without_time_rank_0_does_not_pass(either: Members) -> None:
    assert "Rank 0 timed out in monitoredBarrier" in either[0].call("do", pass_barrier, 0.0)[0]


def test_the_group_goes_on_after_a_barrier_that_was_not_passed(group: Start) -> None:
    members = group(SIZE)
    (told,) = members[0].call("do", pass_barrier, 0.1)
    assert told
    members.all(range(SIZE), "run", "all_reduce", 1)
    # Those that have not come yet are one behind: their next meets no barrier of rank 0 but the one that is over.
    (told,) = members[1].call("do", pass_barrier, 0.1)
    assert "successfully reached" in told
    members[2].call("do", pass_barrier, 0.1)
    assert set(map(tuple, members.all(range(SIZE), "do", pass_barrier).values())) == {("",)}


def test_among_the_survivors_and_in_a_subgroup(group: Start) -> None:
    members = group(SIZE)
    members.all(range(SIZE), "new_group", "late", [1, 2])
    assert set(map(tuple, members.all([1, 2], "do", pass_barrier, group="late").values())) == {("",)}
    (told,) = members[1].call("do", pass_barrier, 0.1, group="late")
    assert "Rank 1 failed" in told, "ranks of the group are named"
    members[0].kill()
    members.all([1, 2], "deactivate", [0])
    assert set(map(tuple, members.all([1, 2], "do", pass_barrier, times=3).values())) == {("",) * 3}


def pass_with_another_default_device(member: MemberProgram) -> None:
    with torch.device("meta"):  # where no message can come from
        member.groups["world"].monitored_barrier(timedelta(seconds=PATIENCE_S))


def test_it_does_not_matter_where_torch_makes_tensors(group: Start) -> None:
    members = group(SIZE)
    members.all(range(SIZE), "do", pass_with_another_default_device)


def test_who_is_to_blame_can_be_read_from_the_exception(group: Start) -> None:
    members = group(SIZE)
    assert members[0].call("do", blame, 0.1) == ("StepFailed", (1,))


def test_a_death_is_told_at_once(group: Start) -> None:
    members = group(SIZE)
    for rank in (0, 2):
        members[rank].send("do", blame, 300.0)  # longer than any answer is waited for
    members[1].kill()
    for rank in (0, 2):
        assert members[rank].answer() == ("EpochRevoked", (1,))


def test_of_another_backend_it_is_torchs_own(tmp_path: Path) -> None:
    with (
        members(tmp_path / "ranks", GroupConfig(1, backend="gloo")) as started,
        pytest.raises(TypeError, match="not a process group of the eep backend"),
    ):
        started[0].call("do", of_another_backend)


def test_it_is_nothing_for_those_outside_the_group() -> None:
    assert eep.pg.monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER) is None
