"""Pods with one rank each, as examples/kubernetes has them: network, process and mount namespaces in place of containers.

They share no directory, no /dev/shm and no processes. One is killed, and started again as the kubelet would.
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
from tests.control.harness import ROOT
from tests.control.store import etcd_cluster
from tests.data_plane.transport.requirements import why_no_links

PATIENCE = 200.0
PROGRAM = ROOT / "examples" / "kubernetes" / "pod.py"
_OWN_FILES = "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o mode=0700 tmpfs /run && exec "
"""A container has these of its own."""


def why_not() -> str | None:
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"no process namespaces here: {done.stderr.strip()}"


_reason = etcd_cluster.why_not() or network_namespaces.why_not() or why_no_links() or why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
    pytest.mark.timeout(600),
]


class Pods:
    def __init__(self, directory: Path, count: int) -> None:
        """The store is beside the pods, on the last host."""
        self.network, self._directory, self.count = network_namespaces.Network(count + 1), directory, count
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._key = directory / "key"
        self._key.write_bytes(os.urandom(32))
        self._endpoint = f"http://{self.network.address(count)}:2379"
        etcd = ["etcd", "--data-dir", str(directory / "etcd"), "--log-level", "error"]
        etcd += ["--listen-client-urls", self._endpoint, "--advertise-client-urls", self._endpoint]
        self._start(count, etcd, "etcd")
        for pod in range(count):
            self.start(pod)

    def _start(self, number: int, command: list[str], name: str) -> None:
        with (self._directory / f"{name}.log").open("ab") as log:
            self._running[number] = subprocess.Popen(
                self.network.command(number, command),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )

    def start(self, pod: int) -> None:
        words = [
            sys.executable,
            str(PROGRAM),
            "--rank",
            pod,
            "--ranks",
            self.count,
            "--address",
            self.network.address(pod),
        ]
        words += ["--store", self._endpoint, "--job", "pods", "--key-file", self._key, "--host-timeout", "3"]
        container = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "sh", "-c"]
        self._start(pod, [*container, _OWN_FILES + " ".join(str(word) for word in words)], f"pod{pod}")

    def kill(self, pod: int) -> None:
        """The first process of its namespace, and with it all others there."""
        process = self._running.pop(pod)
        process.kill()
        process.wait()

    def said(self, pod: int) -> list[dict[str, Any]]:
        """What its ranks have said, oldest first."""
        return [json.loads(line) for line in self.log(pod).splitlines() if line.startswith("{") and line.endswith("}")]

    def log(self, pod: int) -> str:
        return (self._directory / f"pod{pod}.log").read_text()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{path.name}: {path.read_text()[-2000:]}" for path in self._directory.glob("pod*.log")
                )
                raise AssertionError(f"{what} did not come to pass:\n{logs}")
            time.sleep(0.05)

    def step_with(self, *pods: int) -> bool:
        """Whether each of these has an exact step in a view that has exactly these."""
        last = [self.said(pod)[-1:] for pod in pods]
        return all(told and told[0]["active"] == list(pods) and told[0]["exact"] > 0 for told in last)

    def close(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.network.close()


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.long)])
def pods(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pods]:
    running = Pods(tmp_path, request.param)
    yield running
    running.close()


def test_a_pod_that_is_killed_comes_back_and_all_results_are_exact(pods: Pods) -> None:
    everyone = tuple(range(pods.count))
    others = tuple(pod for pod in everyone if pod != 1)
    pods.until("forming", lambda: pods.step_with(*everyone))
    before = pods.said(1)[-1]["incarnation"]
    pods.kill(1)
    pods.until("going on without it", lambda: pods.step_with(*others))
    pods.start(1)
    # The last that it said may be of the life before, in a view like this one.
    pods.until("its return", lambda: pods.said(1)[-1]["incarnation"] > before and pods.step_with(*everyone))
    for pod in others:
        assert {told["incarnation"] for told in pods.said(pod)} == {0}, "a rank was started again for nothing"
    assert not any("wrong value" in pods.log(pod) for pod in everyone)
