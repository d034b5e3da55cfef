"""Ranks die, stop, and come back: no rank hangs, no result is wrong, and the same group goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import eep
from eep import faults
from tests.process_group.collective_calls import COLLECTIVES, values
from tests.process_group.members import Members, wait_until
from tests.rank_program import PATIENCE_S, mapped_memories
from tests.ranks import DIED

Start = Callable[..., Members]
POINTS = [point for point in faults.points() if point.startswith("collective")]


def total(ranks: list[int], seed: int, shape: tuple[int, ...] = (5,)) -> torch.Tensor:
    return torch.stack([values(seed, rank, shape, torch.float32) for rank in ranks]).sum(0)


def check_sums(members: Members, ranks: list[int], seed: int) -> None:
    for (out,) in members.all(ranks, "run", "all_reduce", seed).values():
        assert torch.equal(out, total(ranks, seed))


def go_on_without(members: Members, dead: list[int], survivors: list[int], seed: int = 50) -> None:
    members.all(survivors, "deactivate", dead)
    for active in members.all(survivors, "active").values():
        assert active == tuple(survivors)
    check_sums(members, survivors, seed)


def check_nothing_has_changed(members: Members, view: eep.View) -> None:
    for rank in (0, 1):
        with pytest.raises(eep.PeerUnreachable, match="nothing has changed"):
            members[rank].answer()
    assert set(members.all([0, 1], "view").values()) == {view}
    check_sums(members, [0, 1], 9)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_dies_between_two_calls(group: Start, name: str) -> None:
    """After one has gone well and before the next, which for some needs nothing of the dead: those end a little later."""
    members = group(4)
    members.all(range(4), "run", name, 1, root=1)
    members[1].kill()
    for rank in (0, 2, 3):
        members[rank].send("run_until_trouble", name, 1, root=1)
    assert {members[rank].answer()[1] for rank in (0, 2, 3)} == {"EpochRevoked"}
    # Later calls end at once too, until there is a new view.
    with pytest.raises(eep.EpochRevoked):
        members[3].call("run", "barrier", 1)
    go_on_without(members, [1], [0, 2, 3])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_dies_in_the_call(group: Start, name: str) -> None:
    """At every point of it, one after the other, in a group that goes on and takes the rank back."""
    members = group(3)
    deaths = 0
    for point in POINTS:
        members[1].call("arm", point, "kill", skip=1)
        for rank in (0, 1, 2):
            members[rank].send("run_until_trouble", name, 10, 20, root=1)
        if members[1].answer() != DIED:  # not every call passes every point
            assert {members[rank].answer() for rank in (0, 2)} == {(20, "")}
            members[1].call("disarm")
            continue
        deaths += 1
        for rank in (0, 2):
            count, trouble = members[rank].answer()
            assert trouble == "EpochRevoked", point
            assert count < 20
        go_on_without(members, [1], [0, 2])
        members.rejoin(1, [0, 2])
        check_sums(members, [0, 1, 2], 60)
    assert deaths >= 2, "hardly any point was passed: the test tests nothing"


@pytest.mark.parametrize("lost", [0, 3])
def test_losing_the_lowest_or_the_highest_rank_changes_nothing_for_the_others(group: Start, lost: int) -> None:
    members = group(4)
    members[lost].kill()
    survivors = [rank for rank in range(4) if rank != lost]
    go_on_without(members, [lost], survivors)
    assert set(members.all(survivors, "size").values()) == {4}
    # The slot of the missing rank keeps the caller's value, and the work says who answered.
    for out, answered in members.all(survivors, "answered", 7).values():
        assert answered == tuple(survivors)
        for rank in range(4):
            wanted = torch.full((2,), 9.0) if rank == lost else values(7, rank, (2,), torch.float32)
            assert torch.equal(out[rank], wanted)


def test_survivors_that_notice_in_different_ways_agree(group: Start) -> None:
    members = group(4)
    members[1].kill()
    members[3].kill()
    # One has seen one death, the other has seen the other; one asks twice.
    members[0].send("deactivate", [1])
    members[2].send("deactivate", [3])
    members[0].answer(), members[2].answer()
    go_on_without(members, [1, 3], [0, 2])
    assert len(set(members.all([0, 2], "deactivate", [1, 3]).values())) == 1


def test_pending_works_end_when_a_rank_dies(group: Start) -> None:
    members = group(3)
    members.all([0, 1], "start_async", 1)
    members[0].send("finish_async")
    members[2].kill()
    with pytest.raises(eep.EpochRevoked):
        members[0].answer()


def test_a_message_from_the_dead_is_not_waited_for(group: Start) -> None:
    members = group(3)
    members[0].send("recv", 2)
    members[1].send("recv", None)
    members[2].kill()
    for rank in (0, 1):
        with pytest.raises(eep.EpochRevoked):
            members[rank].answer()
    go_on_without(members, [2], [0, 1])
    members[0].call("send", 1, 5)
    assert torch.equal(members[1].call("recv", 0)[1], values(5, 0, (3,), torch.float32))


def test_a_stopped_rank_is_waited_for_and_then_given_up(group: Start) -> None:
    members = group(3, timeout_ms=6000)
    members[1].stop()
    for rank in (0, 2):
        members[rank].send("run", "all_reduce", 1)
    for rank in (0, 2):
        with pytest.raises(eep.StepFailed, match="rank 1"):
            members[rank].answer()
    members.all([0, 2], "deactivate", [1])
    check_sums(members, [0, 2], 3)
    # It wakes up in a view that is over. Nothing it does reaches the others; it cannot come back as itself.
    members[1].resume()
    with pytest.raises(eep.StepFailed):
        members[1].call("run", "all_reduce", 1)
    with pytest.raises(eep.RankRemoved):
        members[1].call("deactivate", [0])
    check_sums(members, [0, 2], 4)


def test_a_rank_that_stops_for_a_while_costs_only_time(group: Start) -> None:
    members = group(3)
    members[1].stop()
    for rank in (0, 2):
        members[rank].call("start_async", 1)
    for rank in (0, 2):
        wait_until(lambda rank=rank: members[rank].call("is_asleep"))  # type: ignore[misc]
    members[1].resume()
    members[1].call("run", "all_reduce", 1)
    for (out,) in members.all((0, 2), "finish_async").values():
        assert torch.equal(out, total([0, 1, 2], 1))


def test_a_joiner_is_alone_until_it_joins_and_no_rank_waits_for_it(group: Start) -> None:
    members = group(3)
    members[1].kill()
    go_on_without(members, [1], [0, 2])
    assert members[0].call("peer_state", [0, 1, 2]) == ["active", "absent", "active"]
    joiner = members.relaunch(1)
    joiner.call("new_group", "alone", [0, 1, 2])
    (alone,) = joiner.call("run", "all_reduce", 5)
    assert torch.equal(alone, values(5, 1, (5,), torch.float32))
    out, answered = joiner.call("answered", 5)
    assert answered == (1,)
    assert torch.equal(out[0], torch.full((2,), 9.0))
    assert members[0].call("peer_state", [1]) == ["starting"]
    check_sums(members, [0, 2], 6)
    joiner.send("join")
    end = time.monotonic() + PATIENCE_S
    while members[0].call("peer_state", [1]) != ["waiting"]:
        assert time.monotonic() < end
    check_sums(members, [0, 2], 7)
    members.all([0, 2], "recover", [1])
    joiner.answer()
    check_sums(members, [0, 1, 2], 8)


def test_the_dead_are_named(group: Start) -> None:
    members = group(4)
    assert members[0].call("dead_ranks") == ()
    members[1].send("run_until_trouble", "all_reduce", 1)
    members[3].send("run_until_trouble", "all_reduce", 1)
    members[0].send("trouble_in", "all_reduce", 1)
    members[2].kill()
    assert members[0].answer() == (2,)
    for rank in (1, 3):
        members[rank].answer()
    for rank in (0, 1, 3):
        assert members[rank].call("dead_ranks") == (2,)
        assert members[rank].call("peer_state", [0, 1, 2, 3]) == ["active", "active", "dead", "active"]
    go_on_without(members, [2], [0, 1, 3])
    assert members[0].call("dead_ranks") == ()
    assert members[0].call("peer_state", [2]) == ["absent"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_left_is_named_and_gone_on_without(group: Start, ends: bool) -> None:
    """As one that has died, by the same calls; only its state is another."""
    members = group(3)
    members[1].call("destroy")
    if ends:
        members[1].kill()
    members[0].send("run", "all_reduce", 1)
    members[2].send("run", "all_reduce", 1)
    for rank in (0, 2):
        with pytest.raises(eep.StepFailed, match="rank 1 has left") as caught:
            members[rank].answer()
        assert caught.value.ranks == (1,)
        assert "timeout" not in str(caught.value)
        assert members[rank].call("peer_state", [0, 1]) == ["active", "left"]
    with pytest.raises(eep.StepFailed) as caught:
        members[0].call("recv", 1)
    assert caught.value.ranks == (1,)
    with pytest.raises(eep.StepFailed, match="rank 1 has left") as caught:
        members[0].call("send", 1, 1)
    assert caught.value.ranks == (1,)
    dead = members[0].call("dead_ranks")
    assert dead == (1,)
    go_on_without(members, list(dead), [0, 2])
    assert members[0].call("dead_ranks") == ()


def test_ten_cycles_of_kill_and_rejoin_under_load(group: Start) -> None:
    members = group(4)
    members.all(range(4), "new_group", "pair", [0, 1, 2, 3])
    for cycle in range(10):
        lost = cycle % 4
        survivors = [rank for rank in range(4) if rank != lost]
        members[lost].call("arm", ("collective.entered", "collective.after_flags")[cycle % 2], "kill", skip=cycle)
        for rank in range(4):
            members[rank].send("run_until_trouble", "all_reduce", 10)
        members[lost].wait_until_dead()
        assert {members[rank].answer()[1] for rank in survivors} == {"EpochRevoked"}
        go_on_without(members, [lost], survivors, seed=100 + cycle)
        members.relaunch(lost).call("new_group", "pair", [0, 1, 2, 3])
        members[lost].send("join")
        members.all(survivors, "recover", [lost])
        members[lost].answer()
        check_sums(members, [0, 1, 2, 3], 200 + cycle)
        for (out,) in members.all(range(4), "run", "all_reduce", 300 + cycle, group="pair").values():
            assert torch.equal(out, total([0, 1, 2, 3], 300 + cycle))


@pytest.mark.parametrize("moment", ["building", "waiting", "mapped"])
def test_a_joiner_that_dies_leaves_the_survivors_as_they_were(group: Start, moment: str) -> None:
    members = group(3)
    members[2].kill()
    go_on_without(members, [2], [0, 1])
    view = members[0].call("view")
    joiner = members.relaunch(2)
    if moment == "building":
        joiner.kill()
    else:
        joiner.send("join")
        if moment == "mapped":
            wait_until(lambda: members[1].call("peer_state", [2]) == ["waiting"])
            maps = mapped_memories(members[0].pid)
            members[0].send("recover", [2], PATIENCE_S)
            wait_until(lambda: mapped_memories(members[0].pid) > maps)  # now it waits for the vote of rank 1
        joiner.kill()
    for rank in (0, 1):
        if not (moment == "mapped" and rank == 0):
            members[rank].send("recover", [2], 6.0)
    check_nothing_has_changed(members, view)
    members.rejoin(2, [0, 1])
    check_sums(members, [0, 1, 2], 10)


def test_survivors_that_ask_for_an_absent_rank_at_different_times_are_told_the_same(group: Start) -> None:
    """A survivor that waited for the rank in vain still has time to hear the votes of the others."""
    members = group(3)
    members[2].kill()
    go_on_without(members, [2], [0, 1])
    view = members[0].call("view")
    members[0].send("recover", [2], 8.0)
    time.sleep(1.0)  # not a wait for anything: this is how much later the other one asks
    members[1].send("recover", [2], 8.0)
    check_nothing_has_changed(members, view)


def test_ranks_can_be_added_up_to_the_capacity(group: Start) -> None:
    members = group(2, max_ranks=4)
    members.all([0, 1], "new_group", "all", [0, 1])
    members.all([0, 1], "new_group", "first", [0])
    newcomer = members.relaunch(2, size=3)
    newcomer.call("new_group", "all", [0, 1, 2])
    newcomer.send("join")
    members.all([0, 1], "recover", [2])
    newcomer.answer()
    assert set(members.all([0, 1, 2], "size").values()) == {3}
    check_sums(members, [0, 1, 2], 4)
    for (out,) in members.all([0, 1, 2], "run", "all_reduce", 5, group="all").values():
        assert torch.equal(out, total([0, 1, 2], 5))
    members[2].kill()
    go_on_without(members, [2], [0, 1])
    assert set(members.all([0, 1], "size").values()) == {3}


def test_a_second_start_without_deferring_is_refused(group: Start) -> None:
    members = group(2)
    members[1].kill()
    go_on_without(members, [1], [0])
    with pytest.raises(eep.RankInUse, match="defer_join"):
        members.launch(1).call("start")
