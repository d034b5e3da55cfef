"""One rank of a benchmark: a process that does what the parent asks over a pipe, and answers with timestamps.

The parent sends ``("case", tokens)``, ``("run", contender, iterations)`` or ``("verify",)``; the end of the
pipe ends the rank. Answers are ``("ok", value)`` or ``("error", text)``. Timestamps are of the monotonic
clock, which all processes of a machine share, so that the parent can tell when the first began and the last
was done.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bench.common.fleet import PATIENCE_S
from bench.exchange.contenders import Contender, Eep, Gloo, Memcpy
from bench.exchange.workload import Shape, Workload
from eep import Buffer

CONTENDERS = ("eep", "gloo", "memcpy")

Span = tuple[int, int]
"""When this rank began and when it was done, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank this process is, and of what."""

    rank: int
    ranks: int
    shape: Shape
    max_tokens: int
    rendezvous: str


def run_rank(seat: Seat, pipe: Connection) -> None:
    """The life of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the end of its pipe ends us
    try:
        with Rank(seat) as rank:
            pipe.send(("ok", None))
            while True:
                request = pipe.recv()
                pipe.send(("ok", rank.answer(*request)))
    except EOFError:
        pass  # the parent is done with us, or gone
    except Exception:
        with contextlib.suppress(OSError):  # another rank may have failed first, and the parent be gone
            pipe.send(("error", traceback.format_exc()))


class Rank:
    """A connected buffer, a gloo group, and the contenders of the current case."""

    def __init__(self, seat: Seat) -> None:
        torch.set_num_threads(1)
        self._seat = seat
        self._buffer = Buffer(
            seat.rank,
            rendezvous=seat.rendezvous,
            max_ranks=seat.ranks,
            max_tokens=seat.max_tokens,
            hidden=seat.shape.hidden,
            topk=seat.shape.topk,
            local_experts=seat.shape.experts // seat.ranks,
            wire=seat.shape.wire,
            timeout_ms=1000 * PATIENCE_S,
        )
        self._buffer.connect_ranks(range(seat.ranks), timeout=PATIENCE_S)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(seat.rendezvous, "gloo"), seat.ranks),
            rank=seat.rank,
            world_size=seat.ranks,
            timeout=datetime.timedelta(seconds=PATIENCE_S),
        )
        self._contenders: dict[str, Contender] = {}
        # A collection walks every object that importing torch has made: milliseconds, nobody's fault.
        gc.collect()
        gc.freeze()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self._contenders.clear()
        dist.destroy_process_group()
        self._buffer.close()

    def answer(self, request: str, *arguments: Any) -> Any:
        return {"case": self.take_case, "run": self.run, "verify": self.verify}[request](*arguments)

    def take_case(self, tokens: int) -> int:
        """Makes the contenders ready for ``tokens`` tokens per rank; returns how many rows it sends."""
        seat = self._seat
        work = Workload(seat.shape, seat.ranks, seat.rank, tokens)
        self._contenders.clear()  # the memory of the last case goes before that of the next one comes
        self._contenders = {"eep": Eep(work, self._buffer), "gloo": Gloo(work), "memcpy": Memcpy(work)}
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
        # Where ranks share cores, who is done must not go on to other work while others still need the core.
        self._buffer.barrier(PATIENCE_S)
        return begin, end
