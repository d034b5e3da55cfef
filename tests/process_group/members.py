"""Processes with a default group on the eep backend, which a test orders about, stops and kills."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import eep
from eep import faults
from tests.process_group.collective_calls import all_gather_single, run_collective, values
from tests.rank_program import PATIENCE_S
from tests.ranks import RankProcess, Ranks


@dataclass(frozen=True)
class GroupConfig:
    size: int = 4
    max_ranks: int | None = None
    backend: str = "eep"
    chunk_bytes: int = 1 << 20
    device: str = "cpu"

    @property
    def devices(self) -> tuple[str, ...]:
        return ("cpu",) if self.device == "cpu" else ("cpu", self.device)


class MemberProgram:
    """What a member can be told to do. Answers must be plain values or tensors."""

    def __init__(self, rank: int, path: str, config: GroupConfig, timeout_ms: float, incarnation: int | None) -> None:
        torch.set_num_threads(1)
        self.rank, self.path, self.config = rank, path, config
        self.timeout = timedelta(milliseconds=timeout_ms)
        self.groups: dict[str, Any] = {}
        self.pending: list[Any] = []

    def start(self, defer: bool = False, size: int | None = None) -> None:
        if self.config.backend == "eep":
            options = eep.pg.Options(
                defer_join=defer,
                rendezvous=self.path,
                max_ranks=self.config.max_ranks,
                chunk_bytes=self.config.chunk_bytes,
                devices=self.config.devices,
                device_timeout_ms=self.timeout / timedelta(milliseconds=1),
            )
            # Nothing of ours goes through the store.
            store: dist.Store = dist.HashStore()
        else:
            options, store = None, dist.FileStore(f"{self.path}/store", self.config.size)
        dist.init_process_group(
            self.config.backend,
            store=store,
            rank=self.rank,
            world_size=size or self.config.size,
            timeout=self.timeout,
            pg_options=options,
        )
        self.groups["world"] = dist.group.WORLD

    def do(self, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Something of a module of its own, which is given this member."""
        return what(self, *args, **kwargs)

    def new_group(self, name: str, ranks: list[int]) -> None:
        self.groups[name] = dist.new_group(ranks)

    def split(self, name: str, ranks: list[int]) -> None:
        self.groups[name] = eep.pg.split(dist.group.WORLD, ranks)

    def run(self, name: str, seed: int, group: str = "world", count: int = 1, **kwargs: Any) -> list[torch.Tensor]:
        pg = self.groups[group]
        results: list[torch.Tensor] = []
        for i in range(count):
            results += run_collective(name, pg, pg.rank(), pg.size(), seed + i, device=self.config.device, **kwargs)
        # On a GPU calls are only launched: whether they went well is known when the results are read.
        results = [result.cpu() for result in results]
        if self.config.device != "cpu":
            eep.pg.check(pg)
        return results

    def run_on(self, device: str, name: str, seed: int, **kwargs: Any) -> list[torch.Tensor]:
        """As :meth:`run`, on tensors of another device that the group takes."""
        pg = self.groups["world"]
        return run_collective(name, pg, pg.rank(), pg.size(), seed, device=device, **kwargs)

    def run_floats(self, seed: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed * 100 + self.rank)
        tensor = torch.randn(length, generator=random).to(dtype)
        dist.all_reduce(tensor)
        return tensor

    def run_and_destroy(self, seed: int) -> None:
        self.run("all_reduce", seed, shape=(50_000,))
        dist.destroy_process_group()

    def named_split(self, name: str, ranks: list[int]) -> None:
        self.groups[name] = eep.pg.split(dist.group.WORLD, ranks, name=name)

    def bad(self, kind: str) -> None:
        """A call that must be refused before another rank is told of it."""
        match kind:
            case "overlapping":
                dist.all_reduce(torch.zeros(4, 1).expand(4, 4))
            case "sparse":
                dist.all_reduce(torch.zeros(4).to_sparse())
            case "bitwise_floats":
                dist.all_reduce(torch.zeros(4), dist.ReduceOp.BAND)
            case "too_few_outputs":
                dist.all_gather([torch.zeros(4)], torch.zeros(4))
            case "bad_splits":
                dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 2], [2, 2])

    def run_until_trouble(self, name: str, seed: int, limit: int = 10**6, **kwargs: Any) -> tuple[int, str]:
        """How many calls went well, and what ended them."""
        for i in range(limit):
            try:
                self.run(name, seed + i, **kwargs)
            except eep.StepFailed as error:
                return i, type(error).__name__
        return limit, ""

    def trouble_in(self, name: str, seed: int) -> tuple[int, ...]:
        """Which ranks the end of a row of calls is blamed on."""
        while True:
            try:
                self.run(name, seed)
            except eep.StepFailed as error:
                return error.ranks

    def dead_ranks(self) -> tuple[int, ...]:
        return eep.pg.dead_ranks(self.groups["world"])

    def start_async(self, seed: int, group: str = "world", length: int = 5) -> None:
        pg = self.groups[group]
        tensor = values(seed, pg.rank(), (length,), torch.float32)
        self.pending.append((dist.all_reduce(tensor, group=pg, async_op=True), tensor))

    def finish_async(self) -> list[torch.Tensor]:
        """Waits for the works in the order they were started."""
        done, self.pending = self.pending, []
        for work, _ in done:
            work.wait()
        return [tensor for _, tensor in done]

    def is_asleep(self) -> bool:
        """Whether a call that was started waits for another rank, long enough to sleep."""
        return any(endpoint.context.page.sleepers for endpoint in self.groups["world"].world.endpoints)

    def answered(self, seed: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        pg = self.groups["world"]
        out = torch.full((pg.size(), 2), 9.0)
        work = all_gather_single(out, values(seed, pg.rank(), (2,), torch.float32), async_op=True)
        work.wait()
        return out, eep.pg.answered(work)

    def objects(self) -> list[Any]:
        pg = self.groups["world"]
        gathered: list[Any] = [None] * pg.size()
        dist.all_gather_object(gathered, {"rank": self.rank})
        shared = [f"from {self.rank}"]
        dist.broadcast_object_list(shared, src=eep.pg.get_active_ranks(pg)[0])
        return [*gathered, *shared]

    def send(self, to: int, seed: int, length: int = 3, tag: int = 0, group: str = "world") -> None:
        dist.send(values(seed, self.rank, (length,), torch.float32), group_dst=to, tag=tag, group=self.groups[group])

    def recv(self, source: int | None, length: int = 3, tag: int = 0, group: str = "world") -> tuple[int, torch.Tensor]:
        tensor = torch.zeros(length)
        if source is None:
            return dist.recv(tensor, tag=tag, group=self.groups[group]), tensor
        return dist.recv(tensor, group_src=source, tag=tag, group=self.groups[group]), tensor

    def exchange(self, other: int, length: int) -> torch.Tensor:
        """Both send first: neither must wait for the other to receive."""
        tensor = torch.zeros(length)
        works = [
            dist.isend(values(1, self.rank, (length,), torch.float32), other),
            dist.irecv(tensor, other),
        ]
        for work in works:
            work.wait()
        return tensor

    def active(self, group: str = "world") -> tuple[int, ...]:
        return eep.pg.get_active_ranks(self.groups[group])

    def view(self) -> eep.View:
        return self.groups["world"].world.view

    def size(self) -> int:
        return dist.get_world_size()

    def deactivate(self, ranks: list[int]) -> eep.View:
        return eep.pg.deactivate_ranks(self.groups["world"], ranks)

    def peer_state(self, ranks: list[int]) -> list[str]:
        return eep.pg.get_peer_state(self.groups["world"], ranks)

    def recover(self, ranks: list[int], timeout: float = PATIENCE_S) -> eep.View:
        return eep.pg.recover_ranks(self.groups["world"], ranks, timeout=timeout)

    def join(self, timeout: float = PATIENCE_S) -> eep.View:
        return eep.pg.join(self.groups["world"], timeout=timeout)

    def arm(self, point: str, action: str, skip: int = 0, sleep_ms: float = 0) -> None:
        faults.arm(point, action, skip=skip, sleep_ms=sleep_ms)

    def disarm(self) -> None:
        faults.disarm()

    def destroy(self) -> None:
        dist.destroy_process_group()

    def destroy_group(self, name: str) -> None:
        dist.destroy_process_group(self.groups.pop(name))

    def use_after_destroy(self) -> None:
        pg = dist.group.WORLD
        dist.destroy_process_group()
        pg.barrier().wait()


class Members(Ranks):
    """A group of member processes; killed, whatever happens, at the end."""

    def __init__(self, path: Path, config: GroupConfig | None = None, timeout_ms: float = 60_000) -> None:
        self.program = MemberProgram  # type: ignore[assignment]
        self.path, self.config, self.timeout_ms = str(path), config or GroupConfig(), timeout_ms  # type: ignore[assignment]
        self.processes: dict[int, RankProcess] = {}
        self.past: list[RankProcess] = []

    def begin(self) -> None:
        ranks = range(self.config.size)  # type: ignore[attr-defined]
        self.start(ranks)
        self.all(ranks, "start")

    def relaunch(self, rank: int, size: int | None = None) -> RankProcess:
        """A new process that has built its groups alone."""
        process = self.launch(rank)
        process.call("start", defer=True, size=size)
        return process

    def rejoin(self, rank: int, survivors: list[int]) -> None:
        self.relaunch(rank).send("join")
        self.all(survivors, "recover", [rank])
        self[rank].answer()


@contextlib.contextmanager
def members(path: Path, config: GroupConfig | None = None, **kwargs: Any) -> Iterator[Members]:
    path.mkdir(mode=0o700, exist_ok=True)
    with Members(path, config, **kwargs) as group:
        group.begin()
        yield group


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
