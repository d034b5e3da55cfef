"""One rank of the benchmark of dispatch and combine: a process with a buffer, a gloo group and the contenders.

Its answers (see :mod:`bench.common.fleet`) are times of the monotonic clock, which all processes of a machine
share: so the parent can tell when the first rank began and when the last was done.
"""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from bench.common.fleet import PATIENCE_S, serve_requests
from bench.exchange.contenders import Contender, Eep, Gloo, Memcpy
from bench.exchange.workload import Shape, Workload
from eep import Buffer
from eep.data_plane.transport.remote_hosts import RemoteHosts

CONTENDERS = ("eep", "gloo", "memcpy")

Span = tuple[int, int]
"""When this rank began and when it was done, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class ExchangeSeat:
    """Which rank this process is, and of what."""

    rank: int
    ranks: int
    shape: Shape
    max_tokens: int
    rendezvous: str


def run_rank(seat: ExchangeSeat, pipe: Connection) -> None:
    """The life of a rank process."""
    serve_requests(lambda: ExchangeRank(seat), pipe)


class ExchangeRank:
    """A connected buffer, a gloo group, and the contenders of the current case."""

    def __init__(self, seat: ExchangeSeat) -> None:
        torch.set_num_threads(1)
        self._seat = seat
        self._buffer = self.connect()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(seat.rendezvous, "gloo"), seat.ranks),
            rank=seat.rank,
            world_size=seat.ranks,
            timeout=datetime.timedelta(seconds=PATIENCE_S),
        )
        self._contenders: dict[str, Contender] = {}
        # Later collections leave out what importing torch has made: walking all of it takes milliseconds.
        gc.collect()
        gc.freeze()

    def connect(self) -> Buffer:
        """The buffer of this rank, which all others know."""
        buffer = self.buffer(self._seat.rendezvous)
        buffer.connect_ranks(range(self._seat.ranks), timeout=PATIENCE_S)
        return buffer

    def buffer(self, rendezvous: str, hosts: RemoteHosts | None = None) -> Buffer:
        seat = self._seat
        return Buffer(
            seat.rank,
            rendezvous=rendezvous,
            max_ranks=seat.ranks,
            max_tokens=seat.max_tokens,
            hidden=seat.shape.hidden,
            topk=seat.shape.topk,
            local_experts=seat.shape.experts // seat.ranks,
            wire=seat.shape.wire,
            timeout_ms=1000 * PATIENCE_S,
            hosts=hosts,
        )

    def contenders(self, work: Workload) -> dict[str, Contender]:
        return {"eep": Eep(work, self._buffer), "gloo": Gloo(work), "memcpy": Memcpy(work)}

    def close(self) -> None:
        self._contenders.clear()
        dist.destroy_process_group()
        self._buffer.close()

    def case(self, tokens: int) -> int:
        """Makes the contenders for ``tokens`` tokens per rank; returns how many rows this rank sends."""
        seat = self._seat
        work = Workload(seat.shape, seat.ranks, seat.rank, tokens)
        self._contenders.clear()  # frees the memory of the last case before the next one needs its own
        self._contenders = self.contenders(work)
        return work.rows

    def run(self, name: str, iterations: int) -> tuple[list[Span], list[Span]]:
        """Times ``iterations`` rounds; returns the spans of their dispatches and of their combines."""
        contender = self._contenders[name]
        dispatches, combines = [], []
        for _ in range(iterations):
            dispatches.append(self._timed(contender.dispatch))
            contender.experts()
            combines.append(self._timed(contender.combine))
        return dispatches, combines

    def verify(self) -> None:
        for contender in self._contenders.values():
            contender.verify()

    def _timed(self, action: Callable[[], None]) -> Span:
        self._buffer.barrier(PATIENCE_S)
        begin = time.monotonic_ns()
        action()
        end = time.monotonic_ns()
        # Where ranks share cores, a rank that is done must leave the core to those that still measure.
        self._buffer.barrier(PATIENCE_S)
        return begin, end
