"""A rank with two buffers, as the SGLang plugin has: one for any step, one for decode steps."""

from __future__ import annotations

import os
import time

import torch

from eep.control.member import Member
from eep.control.planes import Plane, Planes
from eep.control.private_directory import member_rendezvous
from tests import moe

CONFIG = moe.Config(max_ranks=2)


def main() -> None:
    torch.set_num_threads(1)
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    first, second = (
        CONFIG.buffer(rank, str(member_rendezvous() / name), incarnation=incarnation) for name in ("any", "decode")
    )
    with first, second:
        member = Member.connect(Planes(Plane.of(first), Plane.of(second)))
        member.ready()
        while member.boundary() is not None:
            time.sleep(0.002)
