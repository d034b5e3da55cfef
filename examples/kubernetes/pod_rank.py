"""The rank of a pod: exchanges tokens with the ranks of other pods, step by step, and checks every result.

There is one expert per rank, and expert ``e`` multiplies a token by ``e + 1``. All numbers are small and whole, so that a
result is right bit for bit or not at all. A step that was interrupted is run again in the next view, with the ranks that are
left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import eep
from eep.control.member import Member
from eep.control.planes import Plane, Planes, may_commit
from eep.control.private_directory import PrivateDirectory, member_rendezvous
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.experts.registry.store_registry import StoreRegistry

TOKENS, HIDDEN, TOPK = 16, 256, 2
PATIENCE_MS = 10_000.0
PAUSE_S = 0.005
SAYS_EVERY_S = 0.2


def main() -> int:
    torch.set_num_threads(1)
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    ranks, job = int(os.environ["POD_RANKS"]), os.environ["POD_JOB"]
    key = PrivateDirectory(Path(os.environ["EEP_CONTROL_DIR"])).key()
    endpoints = tuple(os.environ["POD_STORE"].split(","))
    registry = StoreRegistry(lambda: EtcdStore(endpoints, job, seal=RecordSeal(key)))
    others = frozenset(range(ranks)) - {rank}
    with eep.Buffer(
        rank,
        rendezvous=member_rendezvous(),
        incarnation=incarnation,
        hosts=RemoteHosts(others, os.environ["POD_ADDRESS"], registry, key),
        max_ranks=ranks,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        local_experts=1,
        wire="f32",
        timeout_ms=PATIENCE_MS,
    ) as buffer:
        member = Member.connect(Planes(Plane.of(buffer)))
        member.ready()
        done, said = 0, 0.0
        while (view := member.boundary()) is not None:
            if not (is_exact := step(buffer, member, view, done)):
                if is_exact is None:
                    continue  # the same step again, in the next view
                print(f"rank {rank}: step {done} in epoch {view.epoch} gave a wrong value", file=sys.stderr, flush=True)
                return 1
            done += 1
            if time.monotonic() > said + SAYS_EVERY_S:
                said = time.monotonic()
                told = {
                    "rank": rank,
                    "incarnation": incarnation,
                    "epoch": view.epoch,
                    "active": view.active,
                    "exact": done,
                }
                print(json.dumps(told), flush=True)
            time.sleep(PAUSE_S)
    registry.close()
    return 0


def step(buffer: eep.Buffer, member: Member, view: eep.View, number: int) -> bool | None:
    """Whether the result is exact; None if the step was interrupted, and its result must not be used."""
    generator = torch.Generator().manual_seed(number * 1000 + int(os.environ["EEP_RANK"]))
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator).float()
    active = torch.tensor(view.active)
    chosen = torch.rand(TOKENS, len(active), generator=generator).topk(min(TOPK, len(active)), dim=1).indices
    experts = torch.full((TOKENS, TOPK), -1)
    experts[:, : chosen.shape[1]] = active[chosen]
    weights = torch.randint(1, 5, (TOKENS, TOPK), generator=generator) / 2
    received = buffer.dispatch(x, experts, weights)
    out = buffer.combine_input()
    rows, factor = received.rows(), int(os.environ["EEP_RANK"]) + 1
    shares = received.topk_weights[rows] * (received.topk_idx[rows] >= 0)
    out[rows] = received.x[rows] * shares.sum(dim=1, keepdim=True) * factor
    result = buffer.combine(out, received)
    if not may_commit(member, buffer.status()):
        return None
    return torch.equal(result, x * ((experts + 1) * weights * (experts >= 0)).sum(dim=1, keepdim=True))


if __name__ == "__main__":
    sys.exit(main())
