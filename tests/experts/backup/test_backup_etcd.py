"""Two backup services that meet in a real etcd, as those of two hosts do."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.backup_client import BackupClient, LiveParameters
from eep.experts.backup.transfer_engine import Engine
from eep.experts.layout import ExpertMemory
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import wait_for_change
from eep.experts.registry.published_records import BACKUPS
from eep.experts.registry.store_registry import StoreRegistry
from tests.experts import model

etcd = pytest.importorskip("eep.control.store.etcd_store", reason="needs the control plane")
pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")
etcd_cluster = pytest.importorskip("tests.control.store.etcd_cluster", reason="needs the control plane's tests")

PATIENCE = 120.0
NUMBER = model.LAYERS * model.EXPERTS


@pytest.fixture
def endpoint(tmp_path: pathlib.Path) -> Iterator[str]:
    if etcd_cluster.why_not():
        pytest.skip(etcd_cluster.why_not())
    cluster = etcd_cluster.EtcdCluster(tmp_path, nodes=1)
    yield cluster.endpoints[0]
    cluster.close()


def wait_until(registry: StoreRegistry, backups: BackupClient, **held: int) -> None:
    known: dict[str, bytes] = {}
    while {name: int(backup.held.sum()) for name, backup in backups.backups().items()} != held:
        seen = wait_for_change(registry, BACKUPS, known, PATIENCE)
        assert seen != known, f"waited for {held}"
        known = seen


def test_services_of_two_hosts_fill_and_one_that_dies_is_made_good(endpoint: str) -> None:
    registry = StoreRegistry(lambda: etcd.EtcdStore((endpoint,), "test"), ttl=3.0)
    engine, layout = Engine(), model.layout(model.EXPERTS)
    shared = SharedMemory.create("experts", layout.region_bytes)
    everything = Placement(np.tile(np.arange(model.EXPERTS), (model.LAYERS, 1)), model.EXPERTS, model.EXPERTS)
    model.load(ExpertMemory(layout, shared.bytes_at(0, shared.size)), everything, 0)
    LiveParameters(registry, engine, 0, 7, shared).publish(layout, everything, model.checksums())

    command = [
        sys.executable,
        "-m",
        "eep.experts.backup.command",
        "backup",
        "serve",
        "--registry",
        endpoint,
        "--job",
        "test",
    ]
    command += ["--memory", "1GiB", "--replicas", "2", "--expect", "2"]
    services = [subprocess.Popen([*command, "--name", f"s{host}", "--host", str(host)]) for host in range(2)]
    try:
        backups = BackupClient(registry, engine, layout, model.EXPERTS)
        wait_until(registry, backups, s0=NUMBER, s1=NUMBER)
        os.kill(services[0].pid, signal.SIGKILL)
        wait_until(registry, backups, s1=NUMBER)
    finally:
        for service in services:
            service.kill()
            service.wait()
        registry.close()
