"""Makes the processes of a fleet PEs of NVSHMEM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench.exchange.cuda_fleet import CudaFleet
from bench.exchange.nvshmem.pes import make_world_id, start_as_pe, stop_as_pe


@contextlib.contextmanager
def started_pes(fleet: CudaFleet, library: str, heap_bytes: int) -> Iterator[str]:
    """For the length of a with block all processes of the fleet are PEs. Gives what NVSHMEM says of them."""
    made = fleet.ask_one(make_world_id, library)
    told = fleet.ask_all(start_as_pe, fleet.size, library, made, heap_bytes)
    yield told[0]
    # Not after an error: PEs that wait for a peer can do nothing else, and are killed.
    fleet.ask_all(stop_as_pe, library)
