"""Hosts in network namespaces with links between their supervisors, and etcd on hosts of its own or on the same ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.common.network_namespaces import Network
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from tests.control.harness import ROOT

PROGRAM = "tests.control.links.linked_host_program"
PER_HOST = 2
PATIENCE = 200.0


class SeparateHosts:
    """``hosts`` are numbered from 0; ``nodes`` are the numbers of those with a node of etcd, and may be beyond ``hosts``.
    ``program`` is the module that a host runs, and ``timeout`` the host timeout."""

    def __init__(
        self, directory: Path, hosts: int, nodes: Sequence[int], timeout: float, program: str = PROGRAM
    ) -> None:
        self.network = Network(max(hosts, max(nodes) + 1))
        self.count, self._nodes, self._timeout = hosts, nodes, timeout
        self._directory, self._program = directory, program
        self._etcd: list[subprocess.Popen[bytes]] = []
        self._supervisors: dict[int, subprocess.Popen[bytes]] = {}
        self._lives = [0] * hosts
        try:
            for node in nodes:
                self._start_etcd(node)
            for host in range(hosts):
                self.start(host)
        except BaseException:
            self.close()
            raise

    def _start(self, host: int, what: str, arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self._directory / f"{what}{host}.log").open("ab") as log:
            return subprocess.Popen(
                self.network.command(host, arguments),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": search, **environment},
            )

    def _start_etcd(self, node: int) -> None:
        client, peer = (f"http://{self.network.address(node)}:{port}" for port in (2379, 2380))
        options = {
            "name": f"n{node}",
            "data-dir": str(self._directory / f"etcd{node}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"n{each}=http://{self.network.address(each)}:2380" for each in self._nodes),
            "log-level": "error",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._etcd.append(self._start(node, "etcd", ["etcd", *arguments], ETCD_UNSUPPORTED_ARCH="arm64"))

    def start(self, host: int) -> None:
        """Its supervisor, for the first time or anew."""
        self._lives[host] += 1
        nodes = [self._nodes[(host + each) % len(self._nodes)] for each in range(len(self._nodes))]
        arguments = [
            f"h{host}",
            ",".join(str(rank) for rank in self.ranks(host)),
            str(self.count * PER_HOST),
            str(self.private(host)),
            self.network.address(host),
            str(self._timeout),
            *[f"http://{self.network.address(node)}:2379" for node in nodes],
        ]
        self._supervisors[host] = self._start(host, "supervisor", [sys.executable, "-m", self._program, *arguments])

    def ranks(self, host: int) -> range:
        return range(host * PER_HOST, (host + 1) * PER_HOST)

    def private(self, host: int) -> Path:
        return self._directory / f"h{host}-{self._lives[host]}"

    def kill(self, host: int, *, whole: bool = True) -> None:
        """The supervisor, and all other processes of the host if it is ``whole``, at once."""
        process = self._supervisors.pop(host)
        process.send_signal(signal.SIGSTOP)
        for pid in _mentioning(str(self.private(host))) if whole else ():
            if pid != process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()

    def kill_node(self, node: int) -> None:
        """The node of etcd on that host. One that led is followed by another after an election."""
        process = self._etcd[self._nodes.index(node)]
        process.kill()
        process.wait()

    def kill_rank(self, host: int, rank: int) -> None:
        os.kill(self.pid(host, rank), signal.SIGKILL)

    def pid(self, host: int, rank: int) -> int:
        """Of the process of a rank."""
        return int(self.status(host)["ranks"][str(rank)]["pid"])

    def status(self, host: int) -> dict[str, Any]:
        """How a host says it stands; its Unix socket is in the file system, which all namespaces share."""
        try:
            status: dict[str, Any] = json.loads(ask_supervisor(self.private(host), AskStatus()).body)
        except OSError:
            return {"phase": "GONE", "active": [], "ranks": {}, "leased": False, "links": {}}
        return status

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                story = "\n".join(str(self.status(host)) for host in range(self.count))
                raise AssertionError(f"{what} did not come to pass:\n{story}")
            time.sleep(0.05)

    def run_with(self, *hosts: int, linked: bool = True) -> bool:
        """Whether these hosts agree that exactly their ranks are in, and run; and each is ``linked`` to the others."""
        members = [rank for host in hosts for rank in self.ranks(host)]
        stand = [self.status(host) for host in hosts]
        same = len({status["epoch"] for status in stand if "epoch" in status}) == 1
        if linked and any(sum(status["links"].values()) < len(hosts) - 1 for status in stand):
            return False
        return same and all(each["phase"] == "RUN" and each["active"] == members for each in stand)

    def incarnations(self, host: int) -> list[int]:
        return [told["incarnation"] for told in self.status(host)["ranks"].values()]

    def close(self) -> None:
        self.network.heal()
        for process in [*self._supervisors.values(), *self._etcd]:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.network.close()


def _mentioning(text: str) -> list[int]:
    """Processes that have this in their arguments or their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                told = b"\0".join(Path(f"/proc/{name}/{file}").read_bytes() for file in ("cmdline", "environ"))
                if text.encode() in told:
                    found.append(int(name))
    return found
