"""Ranks as real processes on two hosts, which are network namespaces. The store, a real etcd, is on a third."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.common import network_namespaces
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.experts.backup.backup_client import BackupClient
from eep.experts.backup.transfer_engine import Engine
from eep.experts.instance_hosts import InstanceHosts
from eep.experts.registry.store_registry import StoreRegistry
from eep.view import View
from tests.control.store import etcd_cluster
from tests.experts import covered, model
from tests.forks import CONTEXT

HOST_OF = ("a", "a", "b", "b")
HOSTS = ("a", "b")
KEY = b"k" * 32
PATIENCE_S = 120.0
_STORE = 2
"""The number of the namespace in which etcd runs."""


def why_not() -> str | None:
    return etcd_cluster.why_not() or network_namespaces.why_not()


@dataclass(frozen=True)
class RankOptions:
    """How a rank is started. ``empty``: it has loaded nothing."""

    base: str
    rank: int
    incarnation: int
    slots: int
    namespace: str
    address: str
    endpoint: str
    empty: bool = False
    disk: str | None = None
    backup: bool = False


class FarRank:
    """The test's side of a rank."""

    def __init__(self, options: RankOptions) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_main, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, do: str, **details: Any) -> None:
        self._pipe.send_bytes(json.dumps({"do": do, **details}).encode())

    def hear(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the rank said nothing"
        return json.loads(self._pipe.recv_bytes())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        self.kill()
        self._pipe.close()


class FarRanks:
    """Four ranks on two hosts, and what they need."""

    def __init__(self, base: Path, slots: int) -> None:
        self.base, self._slots, self.epoch, self.lives = base, slots, 0, [0] * len(HOST_OF)
        self.disk = str(model.save_checkpoint(base / "model"))
        self.ranks: dict[int, FarRank] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.network = network_namespaces.Network(len(HOSTS) + 1)
        self.endpoint = f"http://{self.network.address(_STORE)}:2379"
        self._start_etcd()

    def _start_etcd(self) -> None:
        peer = f"http://{self.network.address(_STORE)}:2380"
        arguments = [
            "etcd",
            *("--name", "n0", "--data-dir", str(self.base / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"n0={peer}"),
        ]
        self.run(_STORE, arguments, ETCD_UNSUPPORTED_ARCH="arm64")

    def run(self, host: int, arguments: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """A process on a host."""
        with (self.base / f"log{len(self._processes)}").open("wb") as log:
            process = subprocess.Popen(
                self.network.command(host, arguments), stdout=log, stderr=log, env={**os.environ, **environment}
            )
        self._processes.append(process)
        return process

    def start_backup(self, host: str) -> subprocess.Popen[bytes]:
        """One that keeps all experts, from the checkpoint."""
        key = self.base / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        number = HOSTS.index(host)
        return self.run(
            number,
            [
                *(sys.executable, "-m", "eep.experts.backup.command", "backup", "serve", "--name", f"backup-{host}"),
                *("--registry", self.endpoint, "--job", "job", "--key-file", str(key), "--host", str(number)),
                *("--address", self.network.address(number), "--memory", "1GiB", "--checkpoint", self.disk),
            ],
        )

    def start(self, *ranks: int, empty: bool = False, disk: bool = False, backup: bool = False) -> None:
        for rank in ranks:
            host = HOSTS.index(HOST_OF[rank])
            self.ranks[rank] = FarRank(
                RankOptions(
                    *(str(self.base), rank, self.lives[rank], self._slots),
                    *(self.network.namespace(host), self.network.address(host), self.endpoint),
                    empty=empty,
                    disk=self.disk if disk else None,
                    backup=backup,
                )
            )
        for rank in ranks:
            assert self.ranks[rank].hear() == {"ready": True}

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks.pop(rank).end()
            self.lives[rank] += 1

    def enter(self, *active: int) -> dict[int, dict[str, int]]:
        """How many experts each rank brought in for the next view, from where. All have what they should, bit for bit."""
        self.epoch += 1
        for rank in active:
            self.ranks[rank].tell("repair", epoch=self.epoch, active=active, incarnations=self.lives)
        said = {rank: self.ranks[rank].hear() for rank in active}
        assert len({each["digest"] for each in said.values()}) == 1, said
        assert all(each["digest"] and each["wrong"] == [] for each in said.values()), said
        return {rank: each["moved"] for rank, each in said.items()}

    def ask(self, rank: int, do: str, **details: Any) -> Any:
        self.ranks[rank].tell(do, **details)
        return self.ranks[rank].hear()

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.end()
        for process in self._processes:
            process.kill()
            process.wait()
        self.network.close()


@contextlib.contextmanager
def far_ranks(base: Path, slots: int) -> Iterator[FarRanks]:
    made = FarRanks(base, slots)
    try:
        yield made
    finally:
        made.close()


class _Child:
    """The rank itself."""

    def __init__(self, pipe: Connection, options: RankOptions) -> None:
        self.pipe, self._options = pipe, options
        registry = StoreRegistry(lambda: EtcdStore((options.endpoint,), "job", seal=RecordSeal(KEY)), ttl=3.0)
        engine = Engine(options.address, read_within=2.0)
        own = HOST_OF[options.rank]
        self.client = BackupClient(registry, engine, model.layout(options.slots), model.EXPERTS)
        self.rank = covered.Rank(
            Path(options.base) / own,
            options.rank,
            options.slots,
            Path(options.disk) if options.disk else None,
            options.incarnation,
            backup=self.client if options.backup else None,
            hosts=InstanceHosts(HOST_OF, own, registry, engine),
            empty=options.empty,
        )

    def say(self, **what: Any) -> None:
        self.pipe.send_bytes(json.dumps(what).encode())

    def repair(self, epoch: int, active: list[int], incarnations: list[int]) -> None:
        coverage = self.rank.coverage
        before = coverage.brought_in.copy()
        digest = coverage.repair(View(epoch, tuple(active), tuple(incarnations)))
        size = self.rank.memory.layout.expert_bytes
        shown = self.rank.shown
        wrong = None if shown is None else model.wrong_slots(self.rank.memory, shown, self.rank.rank)
        moved = {str(tier): count // size for tier, count in (coverage.brought_in - before).items()}
        self.say(digest=digest, wrong=wrong, moved=moved)

    def await_backup(self) -> None:
        """Says so once a backup has everything."""
        end = time.monotonic() + PATIENCE_S
        while not any(backup.held.all() for backup in self.client.backups().values()):
            assert time.monotonic() < end
            time.sleep(0.05)
        self.say(ok=True)


def _main(pipe: Connection, options: RankOptions) -> None:
    torch.set_num_threads(1)
    network_namespaces.enter(options.namespace)
    _await_etcd(options.endpoint)
    child = _Child(pipe, options)
    child.say(ready=True)
    while True:
        try:
            command = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        getattr(child, command.pop("do"))(**command)


def _await_etcd(endpoint: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"{endpoint}/health", timeout=2) as answer:
                if b'"true"' in answer.read():
                    return
        except OSError:
            assert time.monotonic() < end, "etcd did not start"
            time.sleep(0.05)
