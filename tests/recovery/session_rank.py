"""A rank that runs steps in a session as a server does: ranks exchange sizes, run several layers, commit."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import eep
from eep.control.private_directory import member_rendezvous
from eep.experts.balancing.balance_turns import BalanceTurns
from eep.process_group.world import World
from eep.recovery.callbacks import Repair
from eep.recovery.session import Session
from tests import moe

CONFIG = moe.Config()
DEADLINE_MS = 3000.0
LONG_DEADLINE_MS = 15_000.0
"""Longer than a healthy rank is ever waited for, also on a machine that is busy."""
LAYERS = 3
_APART = 1_000_000


def main(
    repair: Repair = lambda view: 7,
    overlapped: bool = False,
    deadline_ms: float = DEADLINE_MS,
    settles_first: float = 0.0,
    make_turns: Callable[[Session, World], BalanceTurns] | None = None,
) -> None:
    """``settles_first``: in what share of its steps this rank judges the last one before it begins the next. ``make_turns``:
    experts move between steps."""
    torch.set_num_threads(1)
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    journal = Path(os.environ["EEP_CONTROL_DIR"]) / f"journal-{rank}-{incarnation}"
    place = member_rendezvous()
    dist.init_process_group(
        "eep",
        store=dist.HashStore(),
        rank=rank,
        world_size=CONFIG.max_ranks,
        timeout=timedelta(milliseconds=deadline_ms),
        pg_options=eep.pg.Options(defer_join=True, rendezvous=place / "groups"),
    )
    group = dist.group.WORLD
    buffers = [
        CONFIG.buffer(rank, str(place / name), incarnation=incarnation, timeout_ms=deadline_ms)
        for name in ("tokens", "more-tokens")
    ]
    session = Session(group.world, buffers, repair, lambda chosen: run_layers(buffers[chosen], rank, -1, session))
    turns = make_turns(session, group.world) if make_turns else None
    idle = random.Random(rank)
    seed = 0
    last: Pass | None = None
    with journal.open("a", buffering=1) as lines:
        while True:
            has_batch = idle.random() < 0.8

            def gather(has_batch: bool = has_batch) -> list[int]:
                counts = torch.full(
                    (CONFIG.max_ranks,), -1
                )  # anew: a failed try may have heard from a rank that is now lost
                dist.all_gather_single(counts, torch.tensor([int(has_batch)]))
                return counts.tolist()

            try:
                if turns is not None:
                    turns.switch_if_agreed()
                    gather = turns.asking(gather, deadline_ms / 1000)
                    turns.balancer.stepped()
                told = session.collect(gather)
                heard = tuple(peer for peer, count in enumerate(told) if count >= 0)
                assert heard == session.view.active, f"heard from {heard} in {session.view}"
                chosen = sum(told) % 2  # any buffer will do, as long as all ranks choose the same
                now = Pass(buffers[chosen], rank, seed if has_batch else -1, session, last)
                seed += has_batch
                if idle.random() < settles_first:
                    time.sleep(0.02)  # the others have begun by now, and may lose a rank meanwhile
                    session.settle(owed=chosen)
                session.begin(now, chosen, ahead=int(overlapped))
                session.settle(leave=int(overlapped))
            except eep.RankRemoved:
                return
            done, last = (last, now) if overlapped else (now, now)
            if done is None:
                continue
            exact = done.is_exact()
            if done.seed >= 0:
                line = {"epoch": session.view.epoch, "seed": done.seed, "committed": True, "exact": exact}
                lines.write(json.dumps({**line, "repeated": session.repeated}) + "\n")


def overlapping() -> None:
    """The next step begins before the result of the last is used, as in a server with overlap scheduling."""
    main(overlapped=True)


def settling() -> None:
    """As :func:`overlapping`. Some steps are begun only when the last is known to be good, as those with penalties are."""
    main(overlapped=True, deadline_ms=LONG_DEADLINE_MS, settles_first=0.3)


class Pass:
    """A forward pass, and its results when it last ran. It begins with the result of the pass before it, as in a model
    that generates."""

    def __init__(self, buffer: eep.Buffer, rank: int, seed: int, session: Session, before: Pass | None) -> None:
        self._buffer, self._rank, self.seed, self._session = buffer, rank, seed, session
        self._before = before
        self._began_with = self.token = 0
        self._made: tuple[list[torch.Tensor], list[moe.Batch]] = ([], [])

    def __call__(self) -> None:
        self._began_with = self.token = self._before.token if self._before else 0
        seed = self.seed if self.seed < 0 else self.seed + _APART * self._began_with
        self._made = run_layers(self._buffer, self._rank, seed, self._session)
        if self.seed >= 0:
            self.token = int(self._made[0][-1].double().sum().abs() * 1000) % 97

    def is_exact(self) -> bool:
        """Whether the results are right. Asked once, when this pass and the one before it are known to be good."""
        began_with, self._before = self._before.token if self._before else 0, None
        return began_with == self._began_with and all(
            torch.equal(result, moe.reference(CONFIG, batch)) for result, batch in zip(*self._made, strict=True)
        )


def run_layers(
    buffer: eep.Buffer, rank: int, seed: int, session: Session
) -> tuple[list[torch.Tensor], list[moe.Batch]]:
    """A forward pass of several layers; without tokens of its own where ``seed`` is negative."""
    results, batches, view = [], [], session.view
    for layer in range(LAYERS):
        tokens = 0 if seed < 0 else None
        batch = moe.make_batch(CONFIG, rank, max(seed, 0) * LAYERS + layer, view.active, tokens)
        received = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
        results.append(buffer.combine(moe.run_experts(buffer, received), received))
        batches.append(batch)
        time.sleep(0.001)  # a model does more than exchange: most kills should hit the middle of a step
    return results, batches


if __name__ == "__main__":
    sys.exit(main())
