"""Worlds of several ranks within one process: for what has to happen between two lines of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import eep
from eep.data_plane.rendezvous import Rendezvous
from eep.process_group import calls
from eep.process_group.group_options import Options
from eep.process_group.runner import Runner
from eep.process_group.work import EepWork
from eep.process_group.world import World
from eep.view import View

SOON = timedelta(seconds=20)
"""For what is to end at once, on a busy machine."""
CALL_S = 60.0
"""How long a call waits for the others: longer than any test waits for the call."""


class Worlds:
    """Up to ``size`` ranks. Closed at the end, whatever happens."""

    def __init__(self, path: Path, size: int) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.size, self._rendezvous = size, Rendezvous(path)
        self._all: list[World] = []

    def start(self, rank: int) -> World:
        options = Options(lanes=4, chunk_bytes=1 << 16, message_bytes=1 << 12)
        self._all.append(World(rank, self.size, self._rendezvous, options))
        return self._all[-1]

    def close(self) -> None:
        for world in self._all:
            if world.endpoint.is_open:
                world.close()


def enter(worlds: Iterable[World], view: View) -> None:
    """All at once: they wait for each other's memory."""
    together([lambda world=world: world.apply(view, CALL_S) for world in worlds])  # type: ignore[misc]


def together(actions: Iterable[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON.total_seconds())
        assert not thread.is_alive()


def sums(runners: Iterable[Runner], values: Iterable[float]) -> list[float]:
    """One all_reduce of all of them."""
    tensors = [torch.tensor([value]) for value in values]
    works = [queue_sum(runner, tensor) for runner, tensor in zip(runners, tensors, strict=True)]
    for work in works:
        work.wait(SOON)
    return [tensor.item() for tensor in tensors]


def queue_sum(runner: Runner, tensor: torch.Tensor) -> EepWork:
    batch = [calls.all_reduce(tensor, torch.distributed.ReduceOp.SUM)]
    return runner.run(batch, CALL_S, in_background=True)


def check_overtaken(work: EepWork) -> None:
    """It has ended with the view in which it was called."""
    with pytest.raises(eep.EpochRevoked):
        work.wait(SOON)
