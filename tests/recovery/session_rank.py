"""A rank that runs steps in a session as a server does: ranks exchange sizes, run several layers, commit."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import eep
from eep.control.private_directory import member_rendezvous
from eep.data_plane.passage import Passage, count_portions
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
    room: int | None = None,
) -> None:
    """``settles_first``: in what share of its steps this rank judges the last one before it begins the next. ``make_turns``:
    experts move between steps. ``room``: for how many tokens buffers have room; steps with more have portions."""
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
        replace(CONFIG, room=room).buffer(rank, str(place / name), incarnation=incarnation, timeout_ms=deadline_ms)
        for name in ("tokens", "more-tokens")
    ]
    session = Session(group.world, buffers, repair, lambda passage: run_layers(buffers, passage, rank, 0, 0, session))
    turns = make_turns(session, group.world) if make_turns else None
    idle = random.Random(rank)
    seed = 0
    last: Pass | None = None
    with journal.open("a", buffering=1) as lines:
        while True:
            has_batch = idle.random() < 0.8
            tokens = idle.randint(0, CONFIG.max_tokens) if has_batch else 0

            def gather(tokens: int = tokens) -> list[int]:
                counts = torch.full(
                    (CONFIG.max_ranks,), -1
                )  # anew: a failed try may have heard from a rank that is now lost
                dist.all_gather_single(counts, torch.tensor([tokens]))
                return counts.tolist()

            try:
                if turns is not None:
                    turns.switch_if_agreed()
                    gather = turns.asking(gather, deadline_ms / 1000)
                    turns.balancer.stepped()
                told = session.collect(gather)
                heard = tuple(peer for peer, count in enumerate(told) if count >= 0)
                assert heard == session.view.active, f"heard from {heard} in {session.view}"
                # Any buffer will do, as long as all ranks choose the same.
                passage = Passage(sum(told) % 2, count_portions(told, room or CONFIG.max_tokens))
                now = Pass(buffers, passage, rank, seed if has_batch else -1, tokens, session, last)
                seed += has_batch
                if idle.random() < settles_first:
                    time.sleep(0.02)  # the others have begun by now, and may lose a rank meanwhile
                    session.settle(owed=passage)
                session.begin(now, passage, ahead=int(overlapped))
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


def in_portions() -> None:
    """As :func:`settling`, with buffers for a quarter of a batch: a kill mostly hits the middle of a layer."""
    main(overlapped=True, deadline_ms=LONG_DEADLINE_MS, settles_first=0.3, room=2)


class Pass:
    """A forward pass, and its results when it last ran. It begins with the result of the pass before it, as in a model
    that generates."""

    def __init__(
        self,
        buffers: Sequence[eep.Buffer],
        passage: Passage,
        rank: int,
        seed: int,
        tokens: int,
        session: Session,
        before: Pass | None,
    ) -> None:
        """``seed``: negative for an empty batch."""
        self._buffers, self._passage, self._rank, self.seed = buffers, passage, rank, seed
        self._tokens, self._session, self._before = tokens, session, before
        self._began_with = self.token = 0
        self._made: tuple[list[torch.Tensor], list[moe.Batch]] = ([], [])

    def __call__(self) -> None:
        self._began_with = self.token = self._before.token if self._before else 0
        seed = max(self.seed, 0) + _APART * self._began_with
        self._made = run_layers(self._buffers, self._passage, self._rank, seed, self._tokens, self._session)
        if self.seed >= 0:
            self.token = int(self._made[0][-1].double().sum().abs() * 1000) % 97

    def is_exact(self) -> bool:
        """Whether the results are right. Asked once, when this pass and the one before it are known to be good."""
        began_with, self._before = self._before.token if self._before else 0, None
        return began_with == self._began_with and all(
            torch.equal(result, moe.reference(CONFIG, batch)) for result, batch in zip(*self._made, strict=True)
        )


def run_layers(
    buffers: Sequence[eep.Buffer], passage: Passage, rank: int, seed: int, tokens: int, session: Session
) -> tuple[list[torch.Tensor], list[moe.Batch]]:
    """A forward pass of several layers, with so many tokens of its own."""
    results, batches, view = [], [], session.view
    for layer in range(LAYERS):
        batch = moe.make_batch(CONFIG, rank, seed * LAYERS + layer, view.active, tokens)
        results.append(moe.exchange(buffers[passage.buffer], batch, passage))
        batches.append(batch)
        time.sleep(0.001)  # a model does more than exchange: most kills should hit the middle of a step
    return results, batches


if __name__ == "__main__":
    sys.exit(main())
