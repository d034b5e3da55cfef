"""What one rank pays for links to many hosts: a barrier with so many remote peers, and links on which nothing happens.

The peers are ranks of one process, in another network namespace, and know the one rank only. So what that rank pays is its
own process's, and is told apart from what they pay.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.common import network_namespaces
from bench.common.fleet import PATIENCE_S, serve_requests, start_ranks
from eep import Buffer, Rendezvous, View
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.directory_registry import DirectoryRegistry

PEERS = (1, 2, 4, 8, 16, 31)
BARRIERS = 500
_WARM_UP = 20
_IDLE_S = 1.0
_KEY = bytes(32)  # nothing else is in these namespaces


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Microseconds of CPU of the one rank, and of time, for each barrier; and CPU for each second without one."""

    peers: int
    barrier_cpu_us: float
    barrier_us: float
    idle_cpu_us: float


@dataclass(frozen=True, slots=True)
class StarSeat:
    """The one rank, which is rank 0, or all the others."""

    is_center: bool
    peers: int
    rendezvous: str
    namespace: str
    address: str
    provider: str

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) if self.is_center else tuple(range(1, self.peers + 1))


def measure_links(peers: int, barriers: int, provider: str) -> LinkCost:
    """With so many remote peers, in a network of its own."""
    network = network_namespaces.Network(2)
    try:
        with Rendezvous.temporary() as rendezvous:
            seats = [
                StarSeat(
                    host == 0, peers, str(rendezvous.path), network.namespace(host), network.address(host), provider
                )
                for host in (0, 1)
            ]
            with start_ranks(run_star, seats) as fleet:
                fleet.ask("barriers", _WARM_UP)
                cpu_us, time_us = fleet.ask("barriers", barriers)[0]
                idle_us: float = fleet.ask("idle")[0]
                return LinkCost(peers, cpu_us, time_us, idle_us)
    finally:
        network.close()


def run_star(seat: StarSeat, pipe: Connection) -> None:
    """The life of a process of the star."""
    serve_requests(lambda: StarSide(seat), pipe)


class StarSide:
    """The buffers of one process, each used by a thread of its own."""

    def __init__(self, seat: StarSeat) -> None:
        network_namespaces.enter(seat.namespace)
        base = pathlib.Path(seat.rendezvous)
        registry = DirectoryRegistry(base / "links")
        self._buffers = []
        for rank in seat.ranks:
            elsewhere = frozenset(range(1, seat.peers + 1)) if seat.is_center else frozenset({0})
            self._buffers.append(
                Buffer(
                    rank,
                    rendezvous=str(base / f"rank{rank}"),
                    max_ranks=seat.peers + 1,
                    max_tokens=1,
                    hidden=128,
                    topk=1,
                    local_experts=1,
                    timeout_ms=1000 * PATIENCE_S,
                    hosts=RemoteHosts(elsewhere, seat.address, registry, _KEY, seat.provider),
                )
            )

        def enter(index: int) -> None:
            rank = seat.ranks[index]
            active = tuple(range(seat.peers + 1)) if seat.is_center else (0, rank)
            self._buffers[index].apply_view(View(1, active, (0,) * (seat.peers + 1)), timeout=PATIENCE_S)

        self._at_once(enter)

    def barriers(self, count: int) -> tuple[float, float]:
        """Microseconds of CPU of this process and of time, for each of ``count`` barriers."""
        began, cpu = time.monotonic_ns(), time.process_time_ns()

        def run(index: int) -> None:
            for _ in range(count):
                self._buffers[index].barrier(PATIENCE_S)

        self._at_once(run)
        return (time.process_time_ns() - cpu) / 1e3 / count, (time.monotonic_ns() - began) / 1e3 / count

    def idle(self) -> float:
        """Microseconds of CPU of this process in a second in which it does nothing."""
        cpu = time.process_time_ns()
        time.sleep(_IDLE_S)
        return (time.process_time_ns() - cpu) / 1e3 / _IDLE_S

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()

    def _at_once(self, action: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=action, args=(index,)) for index in range(len(self._buffers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def table_of(costs: list[LinkCost]) -> str:
    """All that was measured."""
    head = "| remote peers | CPU per barrier | CPU per barrier and peer | time per barrier | CPU per idle second |"
    lines = [
        f"| {cost.peers} | {cost.barrier_cpu_us:.0f} | {cost.barrier_cpu_us / cost.peers:.1f} | {cost.barrier_us:.0f} "
        f"| {cost.idle_cpu_us:.0f} |"
        for cost in costs
    ]
    return "\n".join([head, "|---:|---:|---:|---:|---:|", *lines])
