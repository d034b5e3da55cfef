"""Ranks as real processes, told what to do over a pipe, so that a test can kill one when it likes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup.backup_client import BackupClient, LiveParameters
from eep.experts.backup.transfer_engine import Engine
from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.layout import ExpertMemory
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.repair.executor import execute_repair
from eep.experts.repair.peer_memory import MappedPeers, serve_region
from eep.experts.repair.reader import Reader, Want
from eep.experts.repair.repair_plan import Origin, Tier, plan_repair
from eep.experts.repair.repair_sources import LocalReader, PeerReader
from eep.view import View
from tests.experts import model
from tests.forks import CONTEXT


class Rank:
    """The test's side of a rank."""

    def __init__(self, directory: pathlib.Path, rank: int, slots: int, incarnation: int = 0) -> None:
        self.rank, self.incarnation = rank, incarnation
        self._pipe, theirs = CONTEXT.Pipe()
        arguments = (theirs, str(directory), rank, slots, incarnation)
        self._process = CONTEXT.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, do: str, **details: Any) -> None:
        self._pipe.send_bytes(json.dumps({"do": do, **details}).encode())

    def hear(self) -> Any:
        """What the rank says next. The timeout of the test is the end of this wait."""
        return json.loads(self._pipe.recv_bytes())

    def ask(self, do: str, **details: Any) -> Any:
        self.tell(do, **details)
        return self.hear()

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def end(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()


class _Child:
    """The rank itself."""

    def __init__(self, pipe: Connection, directory: str, rank: int, slots: int, incarnation: int) -> None:
        self.pipe, self.directory, self.rank = pipe, pathlib.Path(directory), rank
        self.layout = model.layout(slots)
        self.shared = SharedMemory.create("experts", self.layout.region_bytes)
        self.memory = ExpertMemory(self.layout, self.shared.bytes_at(0, self.shared.size))
        self.server = serve_region(self.directory, rank, incarnation, self.shared)
        self.turn = threading.Lock()
        self.engine: Engine | None = None

    def say(self, **what: Any) -> None:
        self.pipe.send_bytes(json.dumps(what).encode())

    def pause(self, what: str) -> None:
        with self.turn:
            self.say(pause=what)
            assert json.loads(self.pipe.recv_bytes()) == {"do": "go"}

    def load(self, placement: list[list[int]]) -> None:
        model.load(self.memory, self.placement(placement), self.rank)
        self.say(ok=True)

    def flip(self, layer: int, slot: int, bit: int) -> None:
        piece = self.memory.pieces(layer, slot)[bit % 2]
        piece[bit // 8 % piece.numel()] ^= 1 << (bit % 8)
        self.say(ok=True)

    def look(self, placement: list[list[int]]) -> None:
        wrong = model.wrong_slots(self.memory, self.placement(placement), self.rank)
        self.say(wrong=wrong, address=self.memory.region.data_ptr())

    def publish(self, placement: list[list[int]], host: int) -> None:
        live = LiveParameters(self.registry(), self.start_engine(), self.rank, host, self.shared)
        live.publish(self.layout, self.placement(placement), model.checksums())
        self.live = live
        self.say(ok=True)

    def repair(
        self,
        before: list[list[int]],
        after: list[list[int]],
        active: list[int],
        incarnations: list[int],
        disk: str | None = None,
        backup: bool = False,
        pause: bool = False,
    ) -> None:
        peers = MappedPeers(self.directory, View(1, tuple(active), tuple(incarnations)), self.layout.region_bytes)
        client = None
        if backup:
            client = BackupClient(self.registry(), self.start_engine(), self.layout, model.EXPERTS)

        def reader_of(origin: Origin) -> Reader:
            reader: Reader
            match origin.tier:
                case Tier.LOCAL:
                    reader = LocalReader(self.memory)
                case Tier.PEER:
                    reader = PeerReader(self.layout, peers, origin.rank)
                case Tier.FAR_PEER:
                    raise AssertionError("all ranks are on one host")
                case Tier.DRAM | Tier.FAR_DRAM:
                    assert client is not None
                    reader = client.reader(origin.backup)
                case Tier.DISK:
                    assert disk is not None
                    reader = CheckpointReader(disk)
            return _Paused(self, reader, str(origin)) if pause else reader

        plan = plan_repair(
            self.placement(before),
            self.placement(after),
            active,
            [0] * len(incarnations),
            self.layout.expert_bytes,
            backups=client.backups() if client else None,
            disk=disk is not None,
        )
        try:
            report = execute_repair(plan, self.rank, self.memory, reader_of, model.checksums())
        except EepError as error:
            self.say(failed=str(error))
        else:
            moved = {tier.name: nbytes // self.layout.expert_bytes for tier, nbytes in report.bytes_by_tier.items()}
            self.say(moved=moved, setbacks=report.setbacks)
        finally:
            peers.close()

    def placement(self, table: list[list[int]]) -> Placement:
        return Placement(np.array(table), model.EXPERTS, self.layout.slots)

    def registry(self) -> DirectoryRegistry:
        self._registry = DirectoryRegistry(self.directory / "registry")
        return self._registry

    def start_engine(self) -> Engine:
        self.engine = self.engine or Engine()
        return self.engine


class _Paused:
    """A source that waits for the test before every read."""

    def __init__(self, child: _Child, reader: Reader, origin: str) -> None:
        self._child, self._reader, self._origin = child, reader, origin

    def alive(self) -> bool:
        self._child.pause(f"alive {self._origin}")
        return self._reader.alive()

    def read(self, wants: Sequence[Want]) -> None:
        self._child.pause(f"read {self._origin}")
        self._reader.read(wants)


def _main(pipe: Connection, directory: str, rank: int, slots: int, incarnation: int) -> None:
    child = _Child(pipe, directory, rank, slots, incarnation)
    child.say(ready=True)
    while True:
        try:
            command = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        getattr(child, command.pop("do"))(**command)
