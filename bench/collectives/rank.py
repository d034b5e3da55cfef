"""One rank of the benchmark of collectives: a process with a group of eep and a group of gloo, which take turns.

Its answers (see :mod:`bench.common.fleet`) are times of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import eep
from bench.common import network_namespaces
from bench.common.fleet import serve_requests

CONTENDERS = ("eep", "gloo")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ELEMENT = torch.float32
# Torch is about to rename these two, and warns at every call.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_KEY = bytes(32)  # nothing else is in the namespaces of a run
_PATIENCE = datetime.timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One of several hosts, which are network namespaces."""

    namespace: str
    address: str


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """Which rank this process is, of how many, and on which host; None where there is one."""

    rank: int
    ranks: int
    rendezvous: str
    host: HostPlace | None = None

    def options(self) -> eep.pg.Options:
        if self.host is None:
            return eep.pg.Options(rendezvous=self.rendezvous)
        own = os.path.join(self.rendezvous, self.host.namespace)
        return eep.pg.Options(rendezvous=own, devices=("cpu",), host=eep.pg.Host(self.host.address, _KEY))


def run_rank(seat: GroupSeat, pipe: Connection) -> None:
    """The life of a rank process."""
    serve_requests(lambda: GroupRank(seat), pipe)


class GroupRank:
    """Both groups, and the tensors of the current case."""

    def __init__(self, seat: GroupSeat) -> None:
        torch.set_num_threads(1)
        if seat.host is not None:
            network_namespaces.enter(seat.host.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if seat.host is None else "eth0"
        self._seat = seat
        store = dist.FileStore(os.path.join(seat.rendezvous, "store"), seat.ranks)
        dist.init_process_group(
            "eep", store=store, rank=seat.rank, world_size=seat.ranks, timeout=_PATIENCE, pg_options=seat.options()
        )
        self._groups = {"eep": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=_PATIENCE)}
        self._collective = ""
        self._given = self._got = torch.empty(0)
        # Later collections leave out what importing torch has made: walking all of it takes milliseconds.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        dist.destroy_process_group()

    def case(self, collective: str, size: int) -> None:
        """Makes the tensors. ``size``: of the larger tensor of a rank, in bytes; at least one value for each rank."""
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
        # Where ranks share cores, a rank that is done must leave the core to those that still measure.
        dist.barrier()
        return ends

    def verify(self) -> None:
        """Raises unless both contenders give the same."""
        results = []
        for contender in CONTENDERS:
            self._got.zero_()
            if self._collective == "all_reduce":
                self._got.copy_(self._given)
            self._call(contender)()
            results.append(self._got.clone())
        if not torch.equal(*results):
            raise AssertionError(f"{self._collective}: eep and gloo give different results on rank {self._seat.rank}")
        self._got.zero_()  # all_reduce adds up in place, call after call: sums of zeros stay finite

    def _call(self, contender: str) -> Callable[[], Any]:
        group, given, got = self._groups[contender], self._given, self._got
        match self._collective:
            case "all_reduce":
                return lambda: dist.all_reduce(got, group=group)
            case "all_gather":
                return lambda: all_gather(got, given, group=group)
            case "reduce_scatter":
                return lambda: reduce_scatter(got, given, group=group)
            case "all_to_all":
                return lambda: dist.all_to_all_single(got, given, group=group)
        raise ValueError(self._collective)
