"""What a member does whose peer is lost, or calls something else, in the middle of DDP's backward pass."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.process_group.members import MemberProgram

CASES = ("mismatch", "killed", "killed after its forward pass")


def run(member: MemberProgram, case: str) -> str:
    """What came of it. Rank 1 is the one that is lost."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    if member.rank == 1 and case != "mismatch":
        if case == "killed after its forward pass":
            model(torch.ones(2, 4))
        time.sleep(0.5)  # the other is in its next backward pass by then
        os._exit(9)
    try:
        if member.rank == 1:
            dist.barrier()
        else:
            model(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
