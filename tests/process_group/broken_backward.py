"""A rank whose peer is lost, or calls something else, in the middle of DDP's backward pass. Prints what came of it."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import eep

CASES = ("mismatch", "killed")


def main(rank: int, path: str, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "eep",
        store=dist.HashStore(),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
        pg_options=eep.pg.Options(rendezvous=path),
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    if rank == 1 and case == "killed":
        time.sleep(0.5)  # the other is in its next backward pass by then
        os._exit(9)
    try:
        if rank == 1:
            dist.barrier()
        else:
            model(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
