"""Calls from callbacks take their places among the other calls, the same on every rank, however fast each rank is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import eep
from eep.process_group import calls
from eep.process_group.runner import Runner
from eep.process_group.work import EepWork
from eep.process_group.world import World
from eep.view import View
from tests.process_group.members import GroupConfig, MemberProgram, members
from tests.process_group.worlds import SOON, Worlds, enter, queue_sum

Make = Callable[[int], Worlds]
SIZE = 2
HOOKS = ("powerSGD", "fp16")


@pytest.fixture
def pair(worlds: Make) -> list[World]:
    made = worlds(SIZE)
    ranks = [made.start(rank) for rank in range(SIZE)]
    enter(ranks, View(1, (0, 1), (0, 0)))
    return ranks


def runners_of(pair: list[World], name: str) -> list[Runner]:
    return [Runner(name, {"cpu": world.open_lane(name, range(SIZE))}) for world in pair]


def wait_for(event: threading.Event) -> None:
    assert event.wait(SOON.total_seconds())


class Told:
    """The sums of one rank, each in a tensor of its own, and an event for each that was called."""

    def __init__(self, runner: Runner, rank: int) -> None:
        self._runner, self._rank = runner, rank
        self.sums: dict[str, torch.Tensor] = {}
        self.called = {name: threading.Event() for name in ("first", "second", "of first", "of second")}
        self.works: list[EepWork] = []

    def call(self, name: str, value: float) -> EepWork:
        self.sums[name] = torch.tensor([value * 10**self._rank])
        work = queue_sum(self._runner, self.sums[name])
        self.works.append(work)
        self.called[name].set()
        return work

    def begin(self, name: str, value: float) -> None:
        """With a callback that makes a call of its own."""
        self.call(name, value).get_future().then(lambda _: self.call(f"of {name}", value + 1.0))


@pytest.mark.parametrize("slow", range(SIZE))
def test_a_rank_that_is_behind_takes_no_sum_for_another(pair: list[World], slow: int) -> None:
    """One rank has made both calls before the first has ended, the other makes its second after the callback of the first."""
    told = [Told(runner, rank) for rank, runner in enumerate(runners_of(pair, "sums"))]
    fast = told[1 - slow]
    fast.begin("first", 1.0)
    fast.begin("second", 3.0)
    told[slow].begin("first", 1.0)
    wait_for(told[slow].called["of first"])
    told[slow].begin("second", 3.0)
    for rank in told:
        for event in rank.called.values():
            wait_for(event)
        for work in rank.works:
            work.wait(SOON)
        assert {name: tensor.item() for name, tensor in rank.sums.items()} == {
            "first": 11.0,
            "of first": 22.0,
            "second": 33.0,
            "of second": 44.0,
        }


def test_a_callback_that_waits_for_a_later_call_is_told_of(pair: list[World]) -> None:
    """It waits for what waits for it. The later call ends, with words, and the group goes on."""
    ranks, over = runners_of(pair, "sums"), threading.Event()
    sums = [torch.ones(1) for _ in ranks]
    for runner in ranks:
        with runner._running:  # so that it is not over before it has its callback, which would then run here
            queue_sum(runner, torch.ones(1)).get_future().then(lambda _: over.wait())
    for runner, tensor in zip(ranks, sums, strict=True):
        later = runner.run([calls.all_reduce(tensor, dist.ReduceOp.SUM)], 0.1, in_background=True)
        with pytest.raises(eep.EepError, match="callbacks of an earlier call"):
            later.wait(SOON)
    over.set()
    works = [queue_sum(runner, tensor) for runner, tensor in zip(ranks, sums, strict=True)]
    for work in works:
        work.wait(SOON)
    assert [tensor.item() for tensor in sums] == [2.0, 2.0]


def test_a_callback_may_wait_for_one_in_another_group_that_calls_this_one(pair: list[World]) -> None:
    outer, inner = runners_of(pair, "outer"), runners_of(pair, "inner")
    done = [threading.Event() for _ in pair]

    def begin(rank: int) -> torch.Tensor:
        total = torch.ones(1)

        def back(_: Any) -> None:
            queue_sum(outer[rank], total).wait(SOON)

        def across(_: Any) -> None:
            queue_sum(inner[rank], torch.ones(1)).get_future().then(back).wait()
            done[rank].set()

        queue_sum(outer[rank], torch.ones(1)).get_future().then(across)
        return total

    totals = [begin(rank) for rank in range(SIZE)]
    for event in done:
        wait_for(event)
    assert [total.item() for total in totals] == [2.0, 2.0]


def test_a_call_from_a_callback_that_did_not_wait_is_not_lost(pair: list[World]) -> None:
    """Its callbacks run when those of the call before have returned long since."""
    outer, inner = runners_of(pair, "outer"), runners_of(pair, "inner")
    returned = [threading.Event() for _ in pair]
    done = [threading.Event() for _ in pair]
    totals = [torch.ones(1) for _ in pair]

    def begin(rank: int) -> None:
        def back(_: Any) -> None:
            wait_for(returned[rank])
            queue_sum(outer[rank], totals[rank]).wait(SOON)
            done[rank].set()

        def across(_: Any) -> None:
            with inner[rank]._running:  # it is not over before it has its callback
                queue_sum(inner[rank], torch.ones(1)).get_future().then(back)

        queue_sum(outer[rank], torch.ones(1)).get_future().then(across)
        queue_sum(outer[rank], torch.ones(1)).wait(SOON)  # behind the callbacks of the first
        returned[rank].set()

    threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for event in done:
        wait_for(event)
    assert [total.item() for total in totals] == [2.0, 2.0]


# ---- the hooks of torch ----


def train(member: MemberProgram, name: str) -> list[torch.Tensor]:
    """The parameters after some steps of a model whose gradients come in several buckets. With gloo each bucket is waited
    for: its calls from callbacks meet others'."""
    one_by_one = member.config.backend == "gloo"
    hook: Any = default_hooks.fp16_compress_hook if name == "fp16" else powerSGD_hook.powerSGD_hook
    torch.manual_seed(1)
    layers = [torch.nn.Linear(48, 48) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    state = None
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, (lambda state, bucket: done(hook(state, bucket).wait())) if one_by_one else hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.Generator().manual_seed(member.rank)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 48, generator=inputs)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.fixture(scope="module")
def trained_with_gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[torch.Tensor]]]:
    with started(tmp_path_factory.mktemp("gloo"), "gloo") as ranks:
        yield {hook: ranks.all(range(SIZE), "do", train, hook)[0] for hook in HOOKS}


def started(path: Path, backend: str) -> Any:
    return members(path / "ranks", GroupConfig(SIZE, backend=backend))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_ddp_trains_as_with_gloo(
    tmp_path: Path, hook: str, trained_with_gloo: dict[str, list[torch.Tensor]]
) -> None:
    with started(tmp_path, "eep") as ranks:
        trained: dict[int, list[torch.Tensor]] = ranks.all(range(SIZE), "do", train, hook)
    for rank in range(SIZE):
        for ours, theirs in zip(trained[rank], trained_with_gloo[hook], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
