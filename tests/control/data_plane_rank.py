"""A rank with a real data plane: dispatches, combines, compares every committed result with the reference."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from eep.control.member import Member
from eep.control.planes import Plane, Planes, may_commit
from eep.control.private_directory import member_rendezvous
from tests import moe

CONFIG = moe.Config()
DEADLINE_MS = 10_000.0


def main() -> None:
    torch.set_num_threads(1)
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    journal = Path(os.environ["EEP_CONTROL_DIR"]) / f"journal-{rank}-{incarnation}"
    with CONFIG.buffer(rank, str(member_rendezvous()), incarnation=incarnation, timeout_ms=DEADLINE_MS) as buffer:
        member = Member.connect(Planes(Plane.of(buffer)))
        member.ready()
        seed = 0
        with journal.open("a", buffering=1) as lines:
            while (view := member.boundary()) is not None:
                batch = moe.make_batch(CONFIG, rank, seed, view.active)
                received = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
                result = buffer.combine(moe.run_experts(buffer, received), received)
                if not may_commit(member, buffer.status()):
                    lines.write(json.dumps({"epoch": view.epoch, "seed": seed, "committed": False}) + "\n")
                    continue  # the same batch again, under the next view
                exact = torch.equal(result, moe.reference(CONFIG, batch))
                lines.write(json.dumps({"epoch": view.epoch, "seed": seed, "committed": True, "exact": exact}) + "\n")
                seed += 1


if __name__ == "__main__":
    sys.exit(main())
