"""Three hosts in network namespaces, each with an etcd node and two ranks: cut one off, one way and both ways, and heal.

The majority goes on; the minority stops, and later rejoins as new incarnations.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.common import network_namespaces
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from tests.control.harness import ROOT
from tests.control.store import etcd_cluster

HOSTS = 3
PER_HOST = 2
PATIENCE = 200.0

_reason = etcd_cluster.why_not() or network_namespaces.why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
    pytest.mark.timeout(900),
]


class Hosts:
    def __init__(self, directory: Path) -> None:
        self.network = network_namespaces.Network(HOSTS)
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for host in range(HOSTS):
                self._start_etcd(host)
            for host in range(HOSTS):
                self._start_supervisor(host)
        except BaseException:
            self.close()
            raise

    def _start(self, host: int, what: str, arguments: list[str], **environment: str) -> None:
        with (self._directory / f"{what}{host}.log").open("wb") as log:
            process = subprocess.Popen(
                self.network.command(host, arguments),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )
        self._processes.append(process)

    def _start_etcd(self, host: int) -> None:
        client, peer = (f"http://{self.network.address(host)}:{port}" for port in (2379, 2380))
        cluster = ",".join(f"n{other}=http://{self.network.address(other)}:2380" for other in range(HOSTS))
        options = {
            "name": f"n{host}",
            "data-dir": str(self._directory / f"etcd{host}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            # Patient, because all three share this machine with everything else.
            "heartbeat-interval": "300",
            "election-timeout": "3000",
            "log-level": "error",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._start(host, "etcd", ["etcd", *arguments], ETCD_UNSUPPORTED_ARCH="arm64")

    def _start_supervisor(self, host: int) -> None:
        endpoints = [f"http://{self.network.address((host + other) % HOSTS)}:2379" for other in range(HOSTS)]
        ranks = ",".join(str(rank) for rank in self.ranks(host))
        arguments = [f"h{host}", ranks, str(HOSTS * PER_HOST), str(self.private(host)), *endpoints]
        self._start(host, "supervisor", [sys.executable, "-m", "tests.control.store.host_program", *arguments])

    def ranks(self, host: int) -> range:
        return range(host * PER_HOST, (host + 1) * PER_HOST)

    def private(self, host: int) -> Path:
        return self._directory / f"h{host}"

    def status(self, host: int) -> dict[str, Any]:
        """How a host says it stands; its Unix socket is in the file system, which all namespaces share."""
        try:
            status: dict[str, Any] = json.loads(ask_supervisor(self.private(host), AskStatus()).body)
        except OSError:
            return {"phase": "GONE", "active": [], "ranks": {}, "leased": False}
        return status

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                story = "\n".join(str(self.status(host)) for host in range(HOSTS))
                raise AssertionError(f"{what} did not come to pass:\n{story}")
            time.sleep(0.1)

    def run_with(self, hosts: tuple[int, ...]) -> bool:
        """Whether these hosts agree that exactly their ranks are in, and run."""
        members = [rank for host in hosts for rank in self.ranks(host)]
        stand = [self.status(host) for host in hosts]
        same = len({status["epoch"] for status in stand if "epoch" in status}) == 1
        return same and all(status["phase"] == "RUN" and status["active"] == members for status in stand)

    def incarnations(self, host: int) -> list[int]:
        return [told["incarnation"] for told in self.status(host)["ranks"].values()]

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.network.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    running = Hosts(tmp_path_factory.mktemp("h"))
    yield running
    running.network.heal()
    running.close()


@pytest.mark.parametrize("both_ways", [True, False], ids=["both ways", "one way"])
def test_the_majority_goes_on_and_the_minority_stops(hosts: Hosts, both_ways: bool) -> None:
    every_host = tuple(range(HOSTS))
    hosts.until("forming", lambda: hosts.run_with(every_host))
    lost = 2 if both_ways else 1
    majority = tuple(host for host in every_host if host != lost)
    before = hosts.incarnations(lost)

    hosts.network.isolate(lost, both_ways=both_ways)
    hosts.until("the minority stopping", lambda: not hosts.status(lost)["leased"])
    assert hosts.status(lost)["phase"] == "REVOKED", "it may not run without the store"
    hosts.until("the majority going on", lambda: hosts.run_with(majority))
    assert hosts.status(lost)["phase"] == "REVOKED"

    hosts.network.heal()
    hosts.until("rejoining", lambda: hosts.run_with(every_host))
    after = hosts.incarnations(lost)
    assert all(new > old for new, old in zip(after, before, strict=True)), "a removed rank came back as itself"
