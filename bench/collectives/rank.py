"""One rank of the benchmark of collectives: a process with a group of eep and a group of gloo, which take turns.

The parent sends ``("case", collective, size)``, ``("run", contender, calls)`` or ``("verify",)``, as in
:mod:`bench.exchange.rank_process`. Answers are timestamps of the monotonic clock, which all processes of a machine share.
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

import eep

CONTENDERS = ("eep", "gloo")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ELEMENT = torch.float32
# Torch is about to rename these, and says so at every call.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_PATIENCE = datetime.timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """Which rank this process is, and of how many."""

    rank: int
    ranks: int
    rendezvous: str


def run_rank(seat: GroupSeat, pipe: Connection) -> None:
    """The life of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the end of its pipe ends us
    try:
        rank = GroupRank(seat)
        pipe.send(("ok", None))
        while True:
            request, *arguments = pipe.recv()
            pipe.send(("ok", getattr(rank, request)(*arguments)))
    except EOFError:
        dist.destroy_process_group()
    except Exception:
        with contextlib.suppress(OSError):  # another rank may have failed first, and the parent be gone
            pipe.send(("error", traceback.format_exc()))


class GroupRank:
    """Both groups, and the tensors of the current case."""

    def __init__(self, seat: GroupSeat) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._seat = seat
        store = dist.FileStore(os.path.join(seat.rendezvous, "store"), seat.ranks)
        options = eep.pg.Options(rendezvous=seat.rendezvous)
        dist.init_process_group(
            "eep", store=store, rank=seat.rank, world_size=seat.ranks, timeout=_PATIENCE, pg_options=options
        )
        self._groups = {"eep": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=_PATIENCE)}
        self._collective = ""
        self._given = self._got = torch.empty(0)
        # A collection walks every object that importing torch has made: milliseconds, nobody's fault.
        gc.collect()
        gc.freeze()

    def case(self, collective: str, size: int) -> None:
        """``size`` is that of the larger tensor of a rank, in bytes; at least one value for each rank."""
        ranks = self._seat.ranks
        values, block = (max(1, size // ELEMENT.itemsize // parts) for parts in (1, ranks))
        given, got = {
            "all_reduce": (values, values),
            "all_gather": (block, block * ranks),
            "reduce_scatter": (block * ranks, block),
            "all_to_all": (block * ranks, block * ranks),
        }[collective]
        self._collective = collective
        # Whole numbers, whose sums are exact in whatever order they are taken.
        self._given = (torch.arange(given) % 1000 + self._seat.rank).to(ELEMENT)
        self._got = torch.zeros(got, dtype=ELEMENT)

    def run(self, contender: str, calls: int) -> list[int]:
        """When this rank was done with each of ``calls`` calls, one right after the other, and before all of them."""
        call = self._call(contender)
        dist.barrier()
        now = time.monotonic_ns
        ends = [now()]
        for _ in range(calls):
            call()
            ends.append(now())
        # Where ranks share cores, who is done must not go on to other work while others still need the core.
        dist.barrier()
        return ends

    def verify(self) -> None:
        """Both must give the same."""
        results = []
        for contender in CONTENDERS:
            self._got.zero_()
            if self._collective == "all_reduce":
                self._got.copy_(self._given)
            self._call(contender)()
            results.append(self._got.clone())
        if not torch.equal(*results):
            raise AssertionError(f"{self._collective}: eep and gloo differ")
        self._got.zero_()  # what all_reduce adds up in place, call after call, stays a number

    def _call(self, contender: str) -> Callable[[], Any]:
        group, given, got = self._groups[contender], self._given, self._got
        match self._collective:
            case "all_reduce":
                return lambda: dist.all_reduce(got, group=group)
            case "all_gather":
                return lambda: _all_gather(got, given, group=group)
            case "reduce_scatter":
                return lambda: _reduce_scatter(got, given, group=group)
            case "all_to_all":
                return lambda: dist.all_to_all_single(got, given, group=group)
        raise ValueError(self._collective)
