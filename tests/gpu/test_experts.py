"""Repair of experts that live in GPU memory: from the memory of another process on the same GPU, and from disk."""

from __future__ import annotations

import multiprocessing
import pathlib
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("xxhash")

from eep.data_plane.memory import memory_of
from eep.data_plane.memory.vmm import DeviceMemory
from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.layout import ExpertMemory
from eep.experts.placement.slot_plan import Placement, plan_placement
from eep.experts.repair.executor import execute_repair
from eep.experts.repair.peer_memory import MappedPeers, copy_all, serve_region
from eep.experts.repair.reader import Reader
from eep.experts.repair.repair_plan import Origin, Tier, plan_repair
from eep.experts.repair.repair_sources import LocalReader, PeerReader
from eep.view import View
from tests.experts import model

SLOTS = model.EXPERTS
LOAD = np.random.default_rng(1).lognormal(0, 1, (model.LAYERS, model.EXPERTS))


class GpuRank:
    """One rank's experts on the GPU."""

    def __init__(self, directory: pathlib.Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.layout = model.layout(SLOTS)
        region = memory_of("cuda").create("experts", self.layout.region_bytes)
        self.memory = ExpertMemory(self.layout, region.bytes_at(0, region.size))
        self.server = serve_region(directory, rank, 0, region)

    def load(self, placement: Placement) -> None:
        model.load(self.memory, placement, self.rank)

    def repair(self, before: Placement, after: Placement, active: list[int], disk: str | None) -> dict[str, int]:
        """Experts moved, by tier; raises if anything is not as it should be afterwards."""
        address = self.memory.region.data_ptr()
        peers = MappedPeers(self.directory, View(1, tuple(active), (0, 0)), self.layout.region_bytes, DeviceMemory)

        def reader_of(origin: Origin) -> Reader:
            if origin.tier is Tier.LOCAL:
                return LocalReader(self.memory)
            if origin.tier is Tier.PEER:
                return PeerReader(self.layout, peers, origin.rank)
            assert disk is not None
            return CheckpointReader(disk)

        steps = plan_repair(before, after, active, [0, 0], self.layout.expert_bytes, disk=disk is not None)
        report = execute_repair(steps, self.rank, self.memory, reader_of, model.checksums())
        peers.close()
        on_host = ExpertMemory(self.layout, self.memory.region.cpu())
        assert model.wrong_slots(on_host, after, self.rank) == []
        assert self.memory.region.data_ptr() == address
        return {tier.name: nbytes // self.layout.expert_bytes for tier, nbytes in report.bytes_by_tier.items()}


def _serve(connection: Connection, directory: str, rank: int) -> None:
    home = GpuRank(pathlib.Path(directory), rank)
    while (message := connection.recv()) is not None:
        name, *arguments = message
        try:
            connection.send(getattr(home, name)(*arguments))
        except Exception as error:
            connection.send(error)


def test_from_another_process_and_from_disk(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o700)
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    ranks = [context.Process(target=_serve, args=(theirs[rank], str(tmp_path), rank), daemon=True) for rank in (0, 1)]

    def ask(rank: int, *message: Any) -> Any:
        ours[rank].send(message)
        assert ours[rank].poll(120), f"rank {rank} does not answer"
        answer = ours[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        for process in ranks:
            process.start()
        # Everything on rank 0 alone; then spread over both, which rank 1 reads out of rank 0's memory.
        alone = plan_placement(LOAD, None, [0], SLOTS, [0, 0], max_copies=1)
        ask(0, "load", alone)
        both = plan_placement(LOAD, alone, [0, 1], SLOTS, [0, 0], max_copies=2)
        moved = ask(1, "repair", alone, both, [0, 1], None)
        assert moved["PEER"] > 0

        # Rank 0 dies with the only copies of what is not on rank 1: those come from disk.
        ranks[0].kill()
        ranks[0].join()
        after = plan_placement(LOAD, both, [1], SLOTS, [0, 0], max_copies=1)
        moved = ask(1, "repair", both, after, [1], str(model.save_checkpoint(tmp_path / "checkpoint")))
        assert "PEER" not in moved
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_copies_of_any_size_at_once() -> None:
    """More than one launch takes, aligned and not, small and large, into the middle of a tensor that stays as it was."""
    sizes = [0, 1, 15, 16, 4096, 65_535, 65_536, 65_537, 1_000_003, *range(100, 200)]
    sources = [torch.randint(0, 255, (size + 3,), dtype=torch.uint8, device="cuda")[3:] for size in sizes]
    targets = [torch.full((size + 32,), 7, dtype=torch.uint8, device="cuda") for size in sizes]
    for shift in (0, 3, 16):
        ends = [target[shift : shift + size] for target, size in zip(targets, sizes, strict=True)]
        copy_all(ends, sources)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            assert torch.equal(target[shift : shift + size], source)
            assert (target[shift + size :] == 7).all()
