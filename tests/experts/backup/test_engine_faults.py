"""A host that goes in the middle of a read: the read ends, and either all is there or nothing is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bench.common import network_namespaces

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")
_reason = network_namespaces.why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(_reason is not None, reason=str(_reason))]


class Program:
    def __init__(self, network: network_namespaces.Network, role: str, host: int) -> None:
        command = [sys.executable, "-m", "tests.experts.backup.engine_program", role]
        self.process = subprocess.Popen(
            [*command, network.namespace(host), network.address(host)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def network() -> Iterator[network_namespaces.Network]:
    made = network_namespaces.Network(2)
    yield made
    made.close()


@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
def test_a_read_ends_and_is_whole_or_nothing(network: network_namespaces.Network, fault: str) -> None:
    reader = Program(network, "read", 0)
    assert reader.hear() == "ready"
    seen: Counter[str] = Counter()
    try:
        for attempt in range(4):
            source = Program(network, "show", 1)
            where = source.hear()
            reader.tell(where)
            assert reader.hear() == "begins"
            # Anywhere from the first byte to the last: no moment may do harm.
            time.sleep(0.04 * attempt)
            if fault == "cut":
                network.cut(1, 0)
            else:
                os.kill(source.process.pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            seen[reader.hear()] += 1
            network.heal()
            source.end()
        source = Program(network, "show", 1)
        reader.tell(source.hear())
        assert reader.hear() == "begins"
        assert reader.hear() == "right", "an engine that is there is read as ever"
        source.end()
    finally:
        reader.end()
    assert set(seen) <= {"failed", "right"}, seen
    assert seen["failed"], f"no fault came in the middle of a read: {seen}"
