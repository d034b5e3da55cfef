"""Futures of calls: what their callbacks may do, and what torch's C++ code sees of a call that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import eep
from eep.process_group.callback_threads import CallbackThreads
from eep.process_group.runner import Runner
from eep.process_group.work import EepWork
from eep.view import View
from tests.process_group import broken_backward
from tests.process_group.members import Members
from tests.process_group.worlds import SOON, Worlds, enter, queue_sum
from tests.ranks import DIED

Make = Callable[[int], Worlds]


def wait(future: torch.futures.Future[Any]) -> Any:
    """A future cannot be waited for with a limit."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(SOON.total_seconds()), "the future is not done"
    return future.value()


@pytest.mark.parametrize("depth", [1, 5])
def test_a_callback_may_make_a_call_of_the_same_group_and_wait_for_it(worlds: Make, depth: int) -> None:
    made = worlds(2)
    ranks = [made.start(rank) for rank in range(2)]
    enter(ranks, View(1, (0, 1), (0, 0)))
    runners = [Runner("sums", {"cpu": world.open_lane("sums", range(2))}) for world in ranks]

    def sum_again(runner: Runner, left: int) -> Callable[[Any], float]:
        def callback(before: Any) -> float:
            tensor = torch.tensor([float(before.value()[0])])
            future = queue_sum(runner, tensor).get_future()
            return float((future.then(sum_again(runner, left - 1)) if left else future.then(first)).wait())

        return callback

    def first(future: Any) -> float:
        return float(future.value()[0])

    futures = [
        queue_sum(runner, torch.tensor([1.0])).get_future().then(sum_again(runner, depth - 1)) for runner in runners
    ]
    assert [wait(future) for future in futures] == [2.0 ** (depth + 1)] * 2


@pytest.mark.parametrize("asked", ["before the end", "after it"])
def test_torch_sees_a_failed_call_as_an_error(asked: str) -> None:
    """Whatever is put in by ``set_exception`` is a value to C++ code, which dies of it."""
    work = EepWork("all_reduce", [torch.zeros(1)])
    future = work.get_future() if asked == "before the end" else None
    work.end(error=eep.StepFailed("rank 2 has died", (2,)))
    future = future or work.get_future()
    assert future is work.get_future()
    with pytest.raises(RuntimeError, match="rank 2 has died"):
        torch.futures.collect_all([future]).wait()
    with pytest.raises(eep.StepFailed) as caught:
        work.wait(SOON)
    assert caught.value.ranks == (2,)


def test_a_future_has_the_tensors_of_its_call() -> None:
    tensor = torch.ones(2)
    work = EepWork("all_reduce", [tensor])
    future = work.get_future()
    assert not future.done()
    work.end((0, 1))
    assert wait(future)[0] is tensor


@pytest.mark.parametrize("case", broken_backward.CASES)
def test_a_lost_peer_is_an_exception_in_the_backward_pass(group: Callable[..., Members], case: str) -> None:
    members = group(2)
    for rank in range(2):
        members[rank].send("do", broken_backward.run, case)
    told = members[0].answer()
    assert told != DIED, "the survivor died of it"
    assert told.startswith("RuntimeError: ")
    assert ("rank 1 called barrier" if case == "mismatch" else "rank 1 has died") in told


def test_callbacks_that_wait_for_each_other_all_run() -> None:
    threads, all_there = CallbackThreads(), threading.Barrier(6)
    for _ in range(3):  # in threads that are new, and then in those that wait for work
        for _ in range(5):
            threads.run(all_there.wait)
        all_there.wait(SOON.total_seconds())
