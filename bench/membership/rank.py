"""A rank of ``python -m bench.membership``: runs real steps, and notes when it saw an epoch revoked or a step commit."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch

import eep
from bench.membership.times import SLOT
from eep.control.member import Member
from eep.control.planes import Plane, Planes, may_commit
from eep.control.private_directory import member_rendezvous

PAUSE_S = 0.001
"""Between steps, so that ranks which share few cores leave time to the supervisor."""


def main() -> None:
    torch.set_num_threads(1)
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    max_ranks = int(os.environ["EEP_BENCH_RANKS"])
    with Path(os.environ["EEP_BENCH_TIMES"]).open("r+b") as file:
        times = mmap.mmap(file.fileno(), 0)
    with eep.Buffer(
        rank,
        rendezvous=member_rendezvous(),
        incarnation=incarnation,
        max_ranks=max_ranks,
        max_tokens=4,
        hidden=256,
        topk=2,
        local_experts=1,
        timeout_ms=30_000,
    ) as buffer:
        member = Member.connect(Planes(Plane.of(buffer)))
        member.ready()
        x = torch.ones(4, 256, dtype=torch.bfloat16)
        revoked = revoked_at = committed = committed_at = 0
        while (view := member.boundary()) is not None:
            targets = torch.tensor([[view.active[0], view.active[-1]]] * 4, dtype=torch.int64)
            if len(view.active) == 1:
                targets[:, 1] = -1
            received = buffer.dispatch(x, targets, torch.ones(4, 2))
            buffer.combine(buffer.combine_input(), received)
            good, now = may_commit(member, buffer.status()), time.monotonic_ns()
            if not good:
                revoked, revoked_at = view.epoch, now
            elif committed < view.epoch:
                committed, committed_at = view.epoch, now
            SLOT.pack_into(times, rank * SLOT.size, revoked, revoked_at, committed, committed_at)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
