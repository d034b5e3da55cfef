"""Members of groups on several hosts: each host is an address of the loopback and a rendezvous of its own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

import eep
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.directory_registry import DirectoryRegistry
from tests.process_group.members import GroupConfig, MemberProgram, Members

KEY = b"k" * 32


@dataclass(frozen=True)
class HostsConfig(GroupConfig):
    """Rank ``r`` is on host ``hosts[r]``."""

    hosts: tuple[int, ...] = (0, 0, 1, 1)
    provider: str = "tcp"
    store: int = 0
    """The port of torch's store, where members agree among themselves."""


class HostMember(MemberProgram):
    """A member that is told its views, as by a supervisor."""

    config: HostsConfig

    def __init__(
        self, rank: int, path: str, config: GroupConfig, timeout_ms: float, incarnation: int | None = None
    ) -> None:
        super().__init__(rank, path, config, timeout_ms, incarnation)
        self.incarnation = incarnation

    def start(self, defer: bool = True, size: int | None = None) -> None:
        host = self.config.hosts[self.rank]
        base = pathlib.Path(self.path)
        remote = RemoteHosts(
            frozenset(rank for rank, other in enumerate(self.config.hosts) if other != host),
            f"127.0.0.{host + 1}",
            DirectoryRegistry(base / "links"),
            KEY,
            self.config.provider,
        )
        options = eep.pg.Options(
            defer_join=True,
            rendezvous=base / f"host{host}",
            max_ranks=len(self.config.hosts),
            incarnation=self.incarnation,
            chunk_bytes=self.config.chunk_bytes,
            remote=remote,
            devices=self.config.devices,
            device_timeout_ms=self.timeout / timedelta(milliseconds=1),
        )
        dist.init_process_group(
            "eep",
            store=dist.HashStore(),
            rank=self.rank,
            world_size=self.config.size,
            timeout=self.timeout,
            pg_options=options,
        )
        self.groups["world"] = dist.group.WORLD

    def apply(self, view: eep.View) -> None:
        eep.pg.apply_view(self.groups["world"], view)


class StoreMember(MemberProgram):
    """A member that finds those of other hosts through torch's store."""

    config: HostsConfig

    def start(self, defer: bool = False, size: int | None = None, key: bytes = KEY) -> None:
        host = self.config.hosts[self.rank]
        options = eep.pg.Options(
            defer_join=defer,
            max_ranks=self.config.max_ranks,
            chunk_bytes=self.config.chunk_bytes,
            rendezvous=f"{self.path}/host{host}",
            host=eep.pg.Host(f"127.0.0.{host + 1}", key),
            devices=self.config.devices,
            device_timeout_ms=self.timeout / timedelta(milliseconds=1),
        )
        dist.init_process_group(
            "eep",
            store=dist.TCPStore("127.0.0.1", self.config.store),
            rank=self.rank,
            world_size=size or self.config.size,
            timeout=self.timeout,
            pg_options=options,
        )
        self.groups["world"] = dist.group.WORLD


class StoreMembers(Members):
    """Ranks of several hosts that agree among themselves."""

    def __init__(self, path: pathlib.Path, config: HostsConfig, timeout_ms: float = 60_000) -> None:
        super().__init__(path, config, timeout_ms)
        self.program = StoreMember  # type: ignore[assignment]


class HostMembers(Members):
    """Views are given, as by a supervisor."""

    def __init__(self, path: pathlib.Path, config: HostsConfig, timeout_ms: float = 60_000) -> None:
        super().__init__(path, config, timeout_ms)
        self.program = HostMember  # type: ignore[assignment]
        self.lives = [0] * len(config.hosts)
        self.epoch = 0

    def begin(self) -> None:
        ranks = range(self.config.size)  # type: ignore[attr-defined]
        for rank in ranks:
            self.launch(rank, 0)
        self.all(ranks, "start")
        self.enter(ranks)

    def enter(self, ranks: Iterable[int]) -> None:
        """The next view, of these."""
        self.epoch += 1
        view = eep.View(self.epoch, tuple(sorted(ranks)), tuple(self.lives))
        self.all(view.active, "apply", view)

    def replace(self, rank: int, survivors: Sequence[int]) -> None:
        self.lives[rank] += 1
        self.launch(rank, self.lives[rank]).call("start")
        self.enter([*survivors, rank])
