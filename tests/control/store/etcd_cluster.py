"""A real etcd cluster on loopback, for tests: three nodes that can be killed, paused and brought back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.control.harness import wait_until_all_threads_stand_still
from tests.ports import free_ports

STARTS_WITHIN = 60.0


def why_not() -> str | None:
    """Why there can be no cluster here, or None."""
    return None if shutil.which("etcd") else "etcd is not installed (apt-get install etcd-server)"


class EtcdCluster:
    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *,
        tls: tuple[str, ...] = (),
        trust: ssl.SSLContext | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        """``options`` are etcd's own. ``tls`` are those for it; then clients use https, and trust what ``trust`` does."""
        ports = free_ports(2 * nodes)
        self._directory, self._options = directory, options
        self._tls, self._scheme, self._trust = tls, "https" if tls else "http", trust
        self._clients, self._peers = ports[:nodes], ports[nodes:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * nodes
        for node in range(nodes):
            self.start(node)
        self.wait_until_healthy()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"{self._scheme}://127.0.0.1:{port}" for port in self._clients)

    def start(self, node: int) -> None:
        client, peer = self.endpoints[node], f"http://127.0.0.1:{self._peers[node]}"
        cluster = ",".join(f"n{index}=http://127.0.0.1:{port}" for index, port in enumerate(self._peers))
        arguments = [
            "etcd",
            *("--name", f"n{node}"),
            *("--data-dir", str(self._directory / f"n{node}")),
            *("--listen-client-urls", client),
            *("--advertise-client-urls", client),
            *("--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster),
            *("--initial-cluster-state", "new"),
            *("--heartbeat-interval", "300", "--election-timeout", "3000"),  # patient: all of them share this machine
            *("--log-level", "error"),
            *self._tls,
            *self._options,
        ]
        with (self._directory / f"n{node}.log").open("ab") as log:
            self._processes[node] = subprocess.Popen(
                arguments,
                stdout=log,
                stderr=log,
                # Debian builds etcd for arm64, but it refuses to start there unless told so.
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
                # Without a terminal's group, so that a paused node is ended with the rest.
                start_new_session=True,
            )

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + STARTS_WITHIN
        for endpoint in self.endpoints:
            while True:
                try:
                    with urllib.request.urlopen(f"{endpoint}/health", timeout=2, context=self._trust) as answer:
                        if b'"true"' in answer.read():
                            break
                except OSError:
                    pass
                if time.monotonic() > deadline:
                    raise RuntimeError(f"etcd did not come up; its log is in {self._directory}")
                time.sleep(0.05)

    def kill(self, node: int) -> None:
        process = self._processes[node]
        assert process is not None
        process.kill()
        process.wait()
        self._processes[node] = None

    def pause(self, node: int) -> None:
        wait_until_all_threads_stand_still(self._signal(node, signal.SIGSTOP))

    def resume(self, node: int) -> None:
        self._signal(node, signal.SIGCONT)

    def _signal(self, node: int, number: signal.Signals) -> int:
        process = self._processes[node]
        assert process is not None
        process.send_signal(number)
        return process.pid

    def leader(self) -> int:
        """The node that leads now, asked of each node itself; while they elect one, that which they elect."""
        deadline = time.monotonic() + STARTS_WITHIN
        while (leader := self._leader()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("no node leads")
            time.sleep(0.1)
        return leader

    def _leader(self) -> int | None:
        for node, endpoint in enumerate(self.endpoints):
            request = urllib.request.Request(f"{endpoint}/v3/maintenance/status", b"{}", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    body = answer.read().decode()
            except OSError:
                continue
            said = json.loads(body)
            if said.get("leader", "0") == said["header"]["member_id"]:
                return node
        return None

    def close(self) -> None:
        for node, process in enumerate(self._processes):
            if process is not None:
                self.kill(node)
