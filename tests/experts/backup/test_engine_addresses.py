"""Engines read from each other at addresses of either kind. Each in a process of its own: Mooncake settles on one kind."""

from __future__ import annotations

import importlib.util
import socket
from multiprocessing.connection import Connection

import pytest
import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.transfer_engine import Engine
from tests.forks import CONTEXT

# Not imported here: the processes import this module, and are to load Mooncake when they know their address.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="needs Mooncake's transfer engine (pip install 'eep[backup]')"
)
BYTES, PATIENCE_S = 4096, 60.0


def read_from_another(pipe: Connection, address: str) -> None:
    shared = SharedMemory.create("shown", BYTES)
    shared.bytes_at(0, BYTES).fill_(7)
    shows, reads = Engine(address), Engine(address)
    into = torch.zeros(BYTES, dtype=torch.uint8)
    reads.read(shows.session, [(shows.expose(shared), into)])
    pipe.send(bool((into == 7).all()))


def has(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_engine_reads_from_another(address: str) -> None:
    if not has(address):
        pytest.skip(f"{address} is no address of this machine")
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=read_from_another, args=(theirs, address), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE_S)
    try:
        assert ours.recv() is True
    except EOFError:
        pytest.fail("the read failed; the process has said why")
    finally:
        process.join()
