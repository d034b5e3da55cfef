"""What a pass of the host copy takes, on a CPU: ``python -m bench.context.copy_pass``.

Requests decode, and each has another whole page by the next pass: the worst that decoding can bring. A pass that finds
nothing to copy is measured beside it, which is what the others are: 16 steps make a page.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eep.requests.kv.copy_layout import PAGE
from eep.requests.kv.kv_journal import fingerprint
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.host_copy import HostCopy

REQUESTS = (4, 64, 256)
CONTEXT = 2048
PASSES = 40


@dataclass
class Passes:
    """Seconds of each pass."""

    first: list[float] = field(default_factory=list)
    """It copies a page of each request, to memory that was never used."""
    later: list[float] = field(default_factory=list)
    """The same, to memory that was."""
    idle: list[float] = field(default_factory=list)
    """There is nothing to copy."""


def measure(requests: int, layers: int, row_bytes: int) -> Passes:
    pool = AnchoredPool()
    table = pool.take_table((requests + 1, CONTEXT))
    slots = (requests + 1) * CONTEXT // 8
    pool.take_cache([torch.empty(slots, row_bytes, dtype=torch.uint8)] * layers)
    table.copy_(torch.randint(slots, table.shape, dtype=torch.int32))
    copy = HostCopy(pool, 2 * requests * CONTEXT * layers * row_bytes)
    assert pool.journal is not None
    rows, passes = np.arange(1, requests + 1), Passes()
    for into in (passes.first, passes.later):
        pool.journal.withdraw_all()
        copy.copy_some()
        for row in rows.tolist():
            pool.journal.name(row, fingerprint(str(row)))
        for number in range(1, PASSES + 1):
            pool.journal.count(rows, np.full(requests, number * PAGE))
            _time(copy, into)
            assert copy._plan.covered == number * requests * PAGE
            _time(copy, passes.idle)
    pool.anchor.close()
    return passes


def _time(copy: HostCopy, into: list[float]) -> None:
    begin = time.perf_counter()
    copy.copy_some()
    into.append(time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.context.copy_pass", description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="lists of rows: two for each layer with heads (32)")
    parser.add_argument("--row-bytes", type=int, default=256, help="of a token in each of them (256)")
    options = parser.parse_args(arguments)
    for requests in REQUESTS:
        with tempfile.TemporaryDirectory() as directory:
            os.environ.update({"EEP_CONTROL_DIR": directory, "EEP_RANK": "0", "EEP_INCARNATION": "0"})
            passes = measure(requests, options.layers, options.row_bytes)
        told = ", ".join(
            f"{what} {1e6 * statistics.median(times):.0f} us (most {1e6 * max(times):.0f})"
            for what, times in (("to new memory", passes.first), ("to used", passes.later), ("idle", passes.idle))
        )
        print(f"{requests} requests, {PAGE * options.layers * options.row_bytes} bytes each: {told}")


if __name__ == "__main__":
    main()
