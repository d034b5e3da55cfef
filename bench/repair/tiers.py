"""How fast repair fills slots from each tier, next to a plain copy of as many bytes in the same run.

The other ranks and the backup service are processes of their own. One rank is on another host: a network namespace, with a
plain TCP connection to it as yardstick. Repair verifies every expert, so the time of
each tier includes the checksum; the checksum alone has a row of its own.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.common import network_namespaces
from bench.common.network_namespaces import Network
from bench.common.timing import median_seconds
from bench.repair.far_rank import FarRank, far_rank
from bench.repair.sample_experts import fill, layout
from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.backup_client import BackupClient, LiveParameters
from eep.experts.backup.transfer_engine import Engine
from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory, checksum
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import DirectoryRegistry, wait_for_change
from eep.experts.repair.executor import execute_repair
from eep.experts.repair.far_peers import FarPeers, FarReader
from eep.experts.repair.peer_memory import MappedPeers
from eep.experts.repair.reader import Reader
from eep.experts.repair.repair_plan import BackupContents, Origin, Tier, plan_repair
from eep.experts.repair.repair_sources import LocalReader, PeerReader
from eep.view import View

_PATIENCE_S = 120.0
_VIEW = View(1, (0, 1), (0, 0))

_OTHER_RANK = """
import pathlib, sys
from bench.repair.sample_experts import fill, layout
from eep.experts.layout import ExpertMemory
from eep.experts.repair.peer_memory import serve_region
from eep.data_plane.memory.shm import SharedMemory
where, experts = pathlib.Path(sys.argv[1]), int(sys.argv[2])
shared = SharedMemory.create("bench", layout(experts).region_bytes)
fill(ExpertMemory(layout(experts), shared.bytes_at(0, shared.size)), experts)
server = serve_region(where, 1, 0, shared)
print("ready", flush=True)
sys.stdin.read()
"""


def measure_tiers(experts: int, times: int = 5) -> list[dict[str, Any]]:
    """Where there can be no namespaces, there is no other host."""
    if network_namespaces.why_not():
        return _measure(experts, times, None)
    network = Network(2)
    try:
        # In a thread of its own, which is on the first host from now on.
        with ThreadPoolExecutor(1, initializer=network_namespaces.enter, initargs=(network.namespace(0),)) as host:
            return host.submit(_measure, experts, times, network).result()
    finally:
        network.close()


def _measure(experts: int, times: int, network: Network | None) -> list[dict[str, Any]]:
    torch.set_num_threads(1)  # one core copies, as one core reads
    shape = layout(experts)
    shared = SharedMemory.create("bench", shape.region_bytes)
    memory = ExpertMemory(shape, shared.bytes_at(0, shared.size))
    fill(memory, experts)
    full = Placement(np.arange(experts)[None], experts, experts)
    sums = Checksums.of_rank(memory, full, 0)
    total = experts * shape.expert_bytes
    target = torch.zeros(total, dtype=torch.uint8)
    rows = [_row("plain copy", _rate(total, times, lambda: target.copy_(memory.region[:total])), total)]
    rows.append(_row("checksum alone", _rate(total, times, lambda: checksum([memory.region[:total]])), total))
    with contextlib.ExitStack() as stack:
        far = None if network is None else stack.enter_context(far_rank(network, shape, experts))
        address = "127.0.0.1" if network is None else network.address(0)
        reader_of, backups = stack.enter_context(_sources(shape, experts, shared, full, sums, address, far))
        tiers = {
            "rank in another process": Tier.PEER,
            "backup, Mooncake TCP": Tier.DRAM,
            "rank of another host, Mooncake TCP": Tier.FAR_PEER,
            "disk, cached": Tier.DISK,
        }
        if far is None:
            del tiers["rank of another host, Mooncake TCP"]
        else:
            into = bytearray(total)
            rows.append(_row("plain TCP from another host", _rate(total, times, lambda: far.receive(into)), total))
        for name, tier in tiers.items():
            work = _repair_work(tier, shape, experts, reader_of, backups, sums)
            rows.append(_row(name, _rate(total, times, work), total))
        work = _repair_work(Tier.DISK, shape, experts, reader_of, backups, sums, cold=True)
        rows.append(_row("disk, not cached", _rate(total, times, work), total))
    reference = rows[0]["gigabytes_per_second"]
    for row in rows:
        row["of_a_plain_copy"] = row["gigabytes_per_second"] / reference
    return rows


def _repair_work(
    tier: Tier,
    shape: ExpertLayout,
    experts: int,
    reader_of: Callable[[Origin], Reader],
    backups: dict[str, BackupContents],
    sums: Checksums,
    cold: bool = False,
) -> Callable[[], None]:
    """Repairs an empty rank 0 from ``tier``: rank 1, a backup or the disk alone holds its experts."""
    empty = np.full((1, experts), -1)
    everything = np.arange(experts)[None]
    there = everything if tier in (Tier.PEER, Tier.FAR_PEER) else empty
    before = Placement(np.concatenate([empty, there], axis=1), experts, experts)
    after = Placement(np.concatenate([everything, there], axis=1), experts, experts)
    held = backups if tier is Tier.DRAM else None
    hosts = [0, 1] if tier is Tier.FAR_PEER else [0, 0]
    steps = plan_repair(before, after, [0, 1], hosts, shape.expert_bytes, backups=held, disk=tier is Tier.DISK)
    mine = ExpertMemory(shape, torch.zeros(shape.region_bytes, dtype=torch.uint8))

    def work() -> None:
        if cold:
            _forget(reader_of(Origin(Tier.DISK)))
        report = execute_repair(steps, 0, mine, reader_of, sums)
        assert set(report.bytes_by_tier) == {tier}
        assert not report.setbacks

    return work


def _forget(reader: Reader) -> None:
    """Drops the checkpoint from the page cache."""
    assert isinstance(reader, CheckpointReader)
    for file in reader.directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextlib.contextmanager
def _sources(
    shape: ExpertLayout,
    experts: int,
    shared: SharedMemory,
    full: Placement,
    sums: Checksums,
    address: str,
    far: FarRank | None,
) -> Iterator[tuple[Callable[[Origin], Reader], dict[str, BackupContents]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with contextlib.ExitStack() as stack:
        where = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eep-bench-")))
        memory = ExpertMemory(shape, shared.bytes_at(0, shared.size))
        names = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")
        save_file(dict(zip(names, memory.tensors(0).values(), strict=True)), where / "model.safetensors")
        disk = CheckpointReader(where)

        command = [sys.executable, "-c", _OTHER_RANK, str(where), str(experts)]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        stack.callback(lambda: (rank.kill(), rank.communicate()))
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        peers = MappedPeers(where, _VIEW, shape.region_bytes)
        stack.callback(peers.close)

        registry, engine = DirectoryRegistry(where / "registry"), Engine(address)
        others = FarPeers(engine, shape, lambda rank: None if far is None else far.record)
        LiveParameters(registry, engine, 0, 0, shared).publish(shape, full, sums)
        command = [sys.executable, "-m", "eep.experts.backup.command", "backup", "serve", "--name", "bench"]
        command += ["--memory", "8GiB", "--registry", str(where / "registry")]
        service = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        stack.callback(lambda: (service.kill(), service.wait()))
        client = BackupClient(registry, engine, shape, experts)
        known: dict[str, bytes] = {}
        while not any(backup.held.all() for backup in client.backups().values()):
            seen = wait_for_change(registry, "backups/", known, _PATIENCE_S)
            assert seen != known, f"the backup service did not fetch all experts within {_PATIENCE_S:.0f} s"
            known = seen

        def reader_of(origin: Origin) -> Reader:
            match origin.tier:
                case Tier.LOCAL:
                    return LocalReader(memory)
                case Tier.PEER:
                    return PeerReader(shape, peers, origin.rank)
                case Tier.FAR_PEER:
                    return FarReader(others, origin.rank)
                case Tier.DRAM | Tier.FAR_DRAM:
                    return client.reader(origin.backup)
                case Tier.DISK:
                    return disk

        yield reader_of, client.backups()
        registry.close()


def _rate(nbytes: int, times: int, work: Callable[[], Any]) -> float:
    return nbytes / median_seconds(work, times) / 1e9


def _row(source: str, rate: float, total: int) -> dict[str, Any]:
    return {"source": source, "megabytes": total / 1e6, "gigabytes_per_second": rate}
