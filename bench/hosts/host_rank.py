"""One rank of the benchmark between hosts: as in :mod:`bench.exchange.rank_process`, in a network namespace."""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.common import network_namespaces
from bench.common.fleet import PATIENCE_S, serve_requests
from bench.exchange.contenders import Contender, Eep, Gloo
from bench.exchange.rank_process import ExchangeRank, ExchangeSeat
from bench.exchange.workload import Workload
from bench.hosts.plain_tcp import PlainTcp, connect_all
from eep import Buffer, View
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.directory_registry import DirectoryRegistry

CONTENDERS = ("eep", "gloo", "tcp")
_PORT = 20_000
_KEY = bytes(32)  # nothing else is in these namespaces


@dataclass(frozen=True, slots=True)
class HostSeat(ExchangeSeat):
    """Also which host it is on: of ``ranks`` ranks, the first half is on the first."""

    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    provider: str

    def host_of(self, rank: int) -> int:
        return rank * 2 // self.ranks

    @property
    def elsewhere(self) -> frozenset[int]:
        mine = self.host_of(self.rank)
        return frozenset(rank for rank in range(self.ranks) if self.host_of(rank) != mine)


def run_host_rank(seat: HostSeat, pipe: Connection) -> None:
    """The life of a rank process."""
    serve_requests(lambda: HostRank(seat), pipe)


class HostRank(ExchangeRank):
    def __init__(self, seat: HostSeat) -> None:
        self._host_seat = seat
        host = seat.host_of(seat.rank)
        network_namespaces.enter(seat.namespaces[host])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        reached = {rank: seat.addresses[seat.host_of(rank)] for rank in {*seat.elsewhere, seat.rank}}
        self._sockets = connect_all(seat.rank, _PORT, reached)
        super().__init__(seat)

    def connect(self) -> Buffer:
        seat = self._host_seat
        base, host = pathlib.Path(seat.rendezvous), seat.host_of(seat.rank)
        registry = DirectoryRegistry(base / "links")
        hosts = RemoteHosts(seat.elsewhere, seat.addresses[host], registry, _KEY, seat.provider)
        buffer = self.buffer(str(base / f"host{host}"), hosts)
        buffer.apply_view(View(1, tuple(range(seat.ranks)), (0,) * seat.ranks), timeout=PATIENCE_S)
        return buffer

    def contenders(self, work: Workload) -> dict[str, Contender]:
        return {"eep": Eep(work, self._buffer), "gloo": Gloo(work), "tcp": PlainTcp(work, self._sockets)}

    def close(self) -> None:
        super().close()
        for connection in self._sockets.values():
            connection.close()
