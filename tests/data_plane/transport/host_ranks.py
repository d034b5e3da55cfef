"""Ranks on two hosts: half of them on each, with a rendezvous of its own. A host is a network namespace, or just an address
of the loopback network."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

import eep
from bench.common import network_namespaces
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.directory_registry import DirectoryRegistry
from tests import moe
from tests.rank_program import RankProgram
from tests.ranks import RankProcess, Ranks


@dataclass(frozen=True)
class HostsConfig(moe.Config):
    """A mixture of experts whose ranks ``r`` run on host ``r * hosts // ranks``."""

    namespaces: tuple[str, ...] = ()
    """None: all hosts are in the namespace of the test."""
    addresses: tuple[str, ...] = ()
    provider: str = "tcp"
    key: bytes = b"k" * 32

    def host_of(self, rank: int) -> int:
        return rank * len(self.addresses) // self.max_ranks


class HostRankProgram(RankProgram):
    """A rank that enters its host before it does anything."""

    def __init__(self, rank: int, path: str, config: HostsConfig, timeout_ms: float, incarnation: int | None) -> None:
        torch.set_num_threads(1)
        host = config.host_of(rank)
        if config.namespaces:
            network_namespaces.enter(config.namespaces[host])
        base = pathlib.Path(path)
        hosts = RemoteHosts(
            frozenset(other for other in range(config.max_ranks) if config.host_of(other) != host),
            config.addresses[host],
            DirectoryRegistry(base / "links"),
            config.key,
            config.provider,
        )
        self.config = config
        self.buffer = config.buffer(
            rank, str(base / f"host{host}"), timeout_ms=timeout_ms, incarnation=incarnation, hosts=hosts
        )

    def start_alone(self) -> None:
        self.buffer.start_alone()

    def threads(self) -> int:
        """How many this process has."""
        return len(list(pathlib.Path("/proc/self/task").iterdir()))

    def descriptors(self) -> int:
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))


class HostRanks(Ranks):
    """Views are given, as by a control plane."""

    def __init__(
        self,
        path: pathlib.Path,
        config: HostsConfig,
        timeout_ms: float = 60_000,
        program: type[HostRankProgram] = HostRankProgram,
    ) -> None:
        super().__init__(eep.Rendezvous(path), config, timeout_ms, program)
        self.lives = [0] * config.max_ranks
        self.epoch = 0

    def launch(self, rank: int, incarnation: int | None = None) -> RankProcess:
        return super().launch(rank, self.lives[rank] if incarnation is None else incarnation)

    def view_of(self, ranks: Iterable[int]) -> eep.View:
        """The next view."""
        self.epoch += 1
        return eep.View(self.epoch, tuple(sorted(ranks)), tuple(self.lives))

    def connect(self, ranks: Iterable[int]) -> None:
        ranks = tuple(ranks)
        self.all(ranks, "apply", self.view_of(ranks))
        self.all(ranks, "barrier")

    def replace(self, rank: int, survivors: Iterable[int], incarnation: int | None = None) -> None:
        self.lives[rank] = self.lives[rank] + 1 if incarnation is None else incarnation
        self.launch(rank)
        self.connect([*survivors, rank])
