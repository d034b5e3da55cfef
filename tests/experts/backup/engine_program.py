"""An engine on a host of its own, for tests: it shows memory until it is killed, or reads that of another when told to."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from bench.common import network_namespaces
from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.transfer_engine import Engine
from eep.experts.backup.transport import TransferFailed

BYTES = 192 << 20


def content() -> torch.Tensor:
    """Bytes of which each run of some MiB differs from every other."""
    return (torch.arange(BYTES // 8, dtype=torch.int64) * 0x9E3779B97F4A7C15).view(torch.uint8)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    role, namespace, address = sys.argv[1:4]
    torch.set_num_threads(1)
    network_namespaces.enter(namespace)
    engine = Engine(address, read_within=3.0)
    if role == "show":
        shared = SharedMemory.create("shown", BYTES)
        shared.bytes_at(0, BYTES).copy_(content())
        _say([engine.session, engine.expose(shared)])
        sys.stdin.read()
        return
    right = content()
    _say("ready")
    for line in sys.stdin:
        session, where = json.loads(line)
        into = torch.zeros(BYTES, dtype=torch.uint8)
        _say("begins")
        try:
            engine.read(session, [(where, into)])
        except TransferFailed:
            _say("failed" if not into.any() else "failed, and wrote")
        else:
            _say("right" if torch.equal(into, right) else "wrong")


if __name__ == "__main__":
    main()
