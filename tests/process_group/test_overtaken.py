"""What was called in one view never runs in the next, where it would meet another call of the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eep
from eep.abi.collectives import CollectiveArgs
from eep.abi.peer_table import RankSet
from eep.process_group import calls
from eep.process_group.gate import Gate
from eep.process_group.lane import Lane
from eep.process_group.monitored_barrier import MonitoredBarrier
from eep.process_group.point_to_point import Messages
from eep.process_group.runner import Runner
from eep.process_group.work import EepWork
from eep.process_group.world import World
from eep.view import View
from tests.process_group.worlds import CALL_S, SOON, Worlds, check_overtaken, enter, queue_sum, sums

Make = Callable[[int], Worlds]


def messages_of(world: World) -> Messages:
    return Messages(world.endpoint, world.open_lane("messages", range(world.size)), CALL_S)


def test_a_call_that_is_queued_when_the_view_changes_ends_with_it(worlds: Make) -> None:
    made = worlds(3)
    ranks = [made.start(rank) for rank in range(3)]
    enter(ranks, View(1, (0, 1, 2), (0, 0, 0)))
    runners = [Runner("group", {"cpu": world.open_lane("group", range(3))}) for world in ranks]
    # The first waits for rank 2, which never calls; rank 1 has called less often than rank 0.
    pending = [queue_sum(runners[rank], torch.ones(1)) for rank in (0, 0, 0, 1, 1)]
    enter(ranks[:2], View(2, (0, 1), (0, 0, 0)))
    for work in pending:
        check_overtaken(work)
    assert sums(runners[:2], [10.0, 20.0]) == [30.0, 30.0]


def test_a_message_that_is_queued_when_the_view_changes_ends_with_it(worlds: Make) -> None:
    made = worlds(3)
    ranks = [made.start(rank) for rank in range(3)]
    enter(ranks, View(1, (0, 1, 2), (0, 0, 0)))
    source, destination = (messages_of(world) for world in ranks[:2])
    # The first is longer than the pipe, and the other rank does not receive it.
    pending = [source.send(torch.zeros(length), 1, 0) for length in (100_000, 1)]
    enter(ranks[:2], View(2, (0, 1), (0, 0, 0)))
    for work in pending:
        check_overtaken(work)
    source.send(torch.tensor([7.0]), 1, 0)
    out = torch.zeros(1)
    destination.receive(out, 0, 0).wait(SOON)
    assert out.item() == 7.0


def test_a_receive_that_was_asked_for_alone_takes_nothing_of_the_view_that_is_joined(worlds: Make) -> None:
    made = worlds(2)
    joiner, other = made.start(0), made.start(1)
    joiner.start_alone()
    receiver, source = messages_of(joiner), messages_of(other)
    early, late = torch.zeros(1), torch.zeros(1)
    pending = receiver.receive(early, None, 0)
    with pytest.raises(eep.StepFailed, match="its source is not in the view"):
        pending.wait(SOON)
    enter([joiner, other], View(1, (0, 1), (0, 0)))
    source.send(torch.tensor([5.0]), 0, 0)
    receiver.receive(late, None, 0).wait(SOON)
    assert (early.item(), late.item()) == (0.0, 5.0)


class Context:
    """Says that all have answered; the view changes after the first call."""

    def __init__(self) -> None:
        self.endpoint: Any = SimpleNamespace(context=self, view=View(4, (0, 1), (0, 0)))
        self.calls = 0

    def open_lane(self, *_: Any) -> int:
        return 0

    def collective(self, args: CollectiveArgs) -> None:
        args.answered = RankSet.of(0b11)
        self.calls += 1
        self.endpoint.view = View(5, (0, 1), (0, 0))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_batch_does_not_go_on_in_the_next_view(in_background: bool) -> None:
    context = Context()
    runner = Runner("group", {"cpu": Lane(context.endpoint, Gate(), 1, [0, 1])})
    work = runner.run([calls.barrier(), calls.barrier()], CALL_S, in_background=in_background)
    with pytest.raises(eep.EpochRevoked, match=r"called in epoch 4, .* run it again in epoch 5"):
        work.wait(SOON)
    assert context.calls == 1
    runner.run([calls.barrier()], CALL_S, in_background=in_background).wait(SOON)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_call_that_was_made_for_another_view_does_not_run(in_background: bool) -> None:
    context = Context()
    runner = Runner("group", {"cpu": Lane(context.endpoint, Gate(), 1, [0, 1])})
    with pytest.raises(eep.EpochRevoked, match="called in epoch 3"):
        runner.run([calls.barrier()], CALL_S, in_background=in_background, epoch=3).wait(SOON)
    assert context.calls == 0


@pytest.mark.parametrize("me", [0, 1])
def test_a_monitored_barrier_between_whose_lines_the_view_changes(me: int) -> None:
    """Its receives are of the next view, where the barriers are counted from 1 again."""
    lane: Any = SimpleNamespace(epoch=4, ranks=[0, 1], active=lambda: 0b11)
    sent: list[int] = []

    def receive(*_: Any) -> EepWork:
        lane.epoch = 5
        return EepWork("recv", [])

    messages: Any = SimpleNamespace(receive=receive, send=lambda _, to, *__: sent.append(to))
    with pytest.raises(eep.EpochRevoked, match="called in epoch 4"):
        MonitoredBarrier(messages, lane).run(me, CALL_S, wait_all=False)
    assert sent == []
