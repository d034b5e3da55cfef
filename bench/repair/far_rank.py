"""A rank on another host, for the measurement of tiers. It shows its experts there, and sends them over plain TCP too."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.common.network_namespaces import Network
from bench.repair.sample_experts import fill, layout
from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.transfer_engine import Engine
from eep.experts.layout import ExpertLayout, ExpertMemory
from eep.experts.registry.published_records import ModelShape, RankRecord

_HOST = 1
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class FarRank:
    """``record`` is what it says of its memory; ``plain`` is where it sends all of it to who connects."""

    record: RankRecord
    plain: tuple[str, int]

    def receive(self, target: bytearray) -> None:
        """Fill ``target`` with what the rank sends over one connection."""
        view = memoryview(target)
        with socket.create_connection(self.plain, _PATIENCE_S) as connection:
            while view:
                view = view[connection.recv_into(view) :]


@contextlib.contextmanager
def far_rank(network: Network, shape: ExpertLayout, experts: int) -> Iterator[FarRank]:
    address = network.address(_HOST)
    command = [sys.executable, "-m", "bench.repair.far_rank", address, str(experts)]
    process = subprocess.Popen(
        network.command(_HOST, command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        session, where, port = json.loads(process.stdout.readline())
        numbers = np.arange(experts, dtype="<i8").tobytes()
        record = RankRecord(_HOST, session, where, experts, ModelShape.of(shape, experts), numbers, bytes(8 * experts))
        yield FarRank(record, (address, port))
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    address, experts = sys.argv[1], int(sys.argv[2])
    shape = layout(experts)
    shared = SharedMemory.create("bench", shape.region_bytes)
    memory = shared.bytes_at(0, shared.size)
    fill(ExpertMemory(shape, memory), experts)
    engine = Engine(address)
    with socket.create_server((address, 0)) as server:
        print(json.dumps([engine.session, engine.expose(shared), server.getsockname()[1]]), flush=True)
        while True:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(memoryview(memory.numpy()))


if __name__ == "__main__":
    main()
