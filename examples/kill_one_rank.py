"""One rank of ``kill_one.py``: exchanges tokens step after step, and changes its view when it is told to.

The rank takes steps on its own; the supervisor only says *when to change*. A thread reads its orders from a
pipe, because the step itself may be waiting for a peer that is gone:

* ``("hold",)``: begin no further step, and answer how many were begun in this epoch. The largest answer of
  all ranks is a boundary that every rank can still reach and none has passed.
* ``("drop", rank, epoch)``: that rank is dead. Revoke the epoch, which ends every wait; go on without it.
* ``("admit", rank, incarnation, epoch, after)``: connect a joiner after that many steps of this epoch.
* ``("finish", after)``: the same boundary, for the end.

Each step is one batch of this rank: dispatch, a tiny computation per expert, combine. The rank accepts a step
only if its status is good, and then it must equal the exact expected value. Otherwise it runs the batch again.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from eep import Buffer, View

TOKENS, HIDDEN, TOPK = 32, 256, 2
EXPERTS_PER_RANK = 2
SLOTS_PER_RANK = 2 * EXPERTS_PER_RANK
"""Each rank also holds a copy of its left neighbour's experts: after the loss of one rank none is missing."""

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank a process is; ``joins`` if the others are already at work."""

    rank: int
    ranks: int
    rendezvous: str
    joins: bool


def run_rank(seat: Seat, pipe: Connection) -> None:
    """The life of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which ends us
    torch.set_num_threads(1)
    post = Post(pipe)
    try:
        with Buffer(
            seat.rank,
            rendezvous=seat.rendezvous,
            max_ranks=seat.ranks,
            max_tokens=TOKENS,
            hidden=HIDDEN,
            topk=TOPK,
            local_experts=SLOTS_PER_RANK,
            wire="f32",  # small whole numbers are exact in it, so that results can be compared bit for bit
            timeout_ms=1000 * PATIENCE_S,  # the supervisor ends waits long before this deadline would
        ) as buffer:
            post.send("here", buffer.incarnation)
            view = buffer.join(timeout=PATIENCE_S) if seat.joins else buffer.connect_ranks(range(seat.ranks))
            post.send("connected", view.epoch)
            worker = Worker(seat, buffer, post)
            worker.run()
            post.send("summary", worker.summary())
    except Exception:
        post.send("error", traceback.format_exc())


class Post:
    """Messages to the supervisor, each with its time. Two threads write, one at a time."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._one_at_a_time = threading.Lock()

    def send(self, what: str, value: Any, moment_ns: int | None = None) -> None:
        with self._one_at_a_time:
            try:
                self.pipe.send((what, moment_ns or time.monotonic_ns(), value))
            except OSError:
                pass  # the supervisor is gone; the thread that reads the pipe sees that by its end


class Orders:
    """Passes orders from the thread that hears the supervisor to the one that takes steps."""

    def __init__(self, buffer: Buffer, post: Post) -> None:
        self._buffer = buffer
        self._post = post
        self._changed = threading.Condition()
        self._begun = 0  # steps of this epoch, the one under way included
        self._limit: int | None = None  # how many may be begun for now
        self._order: tuple[Any, ...] | None = None
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def begin_step(self) -> tuple[Any, ...] | None:
        """Returns None when the next step may begin, or the order that comes before it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_due() or self._may_begin(), PATIENCE_S):
                raise TimeoutError(f"the supervisor held this rank and gave no order within {PATIENCE_S:.0f} s")
            if self._is_due():
                order, self._order, self._limit, self._begun = self._order, None, None, 0
                return order
            self._begun += 1
            return None

    def hold(self) -> int:
        """Begins no step until an order comes. Returns how many steps of this epoch have begun."""
        with self._changed:
            if self._limit is None:
                self._limit = self._begun
            return self._begun

    def _is_due(self) -> bool:
        return self._order is not None and (self._order[0] == "drop" or self._begun >= (self._limit or 0))

    def _may_begin(self) -> bool:
        return self._limit is None or self._begun < self._limit

    def _listen(self) -> None:
        while True:
            try:
                order = self._post.pipe.recv()
            except (EOFError, OSError):
                order = ("drop", None, None)  # the supervisor is gone, and no other process would end our waits
            if order[0] == "hold":
                self._post.send("begun", self.hold())
                continue
            if order[0] == "drop":
                self._buffer.revoke()  # the step under way ends at once, here and at every peer
            with self._changed:
                self._order = order
                self._limit = None if order[0] == "drop" else order[-1]
                self._changed.notify()
            if order[0] == "finish" or order[1] is None:
                return


class Worker:
    """Takes steps and counts them."""

    def __init__(self, seat: Seat, buffer: Buffer, post: Post) -> None:
        self._seat = seat
        self._buffer = buffer
        self._post = post
        self._orders = Orders(buffer, post)
        self._experts = EXPERTS_PER_RANK * seat.ranks
        self._held_experts = _experts_held_by(seat.rank, seat.ranks)
        self._step = 0
        self._accepted: Counter[int] = Counter()  # by epoch
        self._rejected = self._rejected_wrong = self._accepted_wrong = 0
        self._addresses: set[tuple[int, ...]] = set()

    def run(self) -> None:
        """Takes steps until the supervisor says to finish."""
        while True:
            order = self._orders.begin_step()
            if order is None:
                self._take_step()
            elif order[0] == "drop" and order[1] is not None:
                self._buffer.disconnect_ranks([order[1]], epoch=order[2])
            elif order[0] == "admit":
                _, rank, incarnation, epoch, _ = order
                self._buffer.connect_ranks([rank], epoch=epoch, incarnations={rank: incarnation})
            else:
                return

    def summary(self) -> dict[str, Any]:
        return {
            "incarnation": self._buffer.incarnation,
            "accepted": dict(self._accepted),
            "accepted_wrong": self._accepted_wrong,
            "rejected": self._rejected,
            "rejected_wrong": self._rejected_wrong,
            "addresses": len(self._addresses),
        }

    def _take_step(self) -> None:
        x, experts, weights = self._batch()
        epoch = self._buffer.view.epoch
        tokens = self._buffer.dispatch(x, self._slots_of(experts, self._buffer.view), weights)
        outputs = self._buffer.combine_input()
        _compute(self._held_experts, tokens.x, tokens.topk_idx, tokens.topk_weights, outputs)
        result = self._buffer.combine(outputs, tokens)
        done_ns = time.monotonic_ns()
        status = self._buffer.status()
        is_right = torch.equal(result, _expected(x, experts, weights))
        table = ctypes.addressof(self._buffer.table)
        self._addresses.add((table, tokens.x.data_ptr(), tokens.topk_idx.data_ptr(), outputs.data_ptr()))
        if not status.ok:
            self._post.send("left", str(status), done_ns)
            self._orders.hold()
            self._rejected += 1
            self._rejected_wrong += not is_right
            return  # the same batch again, in the next epoch
        if epoch not in self._accepted:
            self._post.send("good", epoch, done_ns)
        self._accepted[epoch] += 1
        self._accepted_wrong += not is_right
        self._step += 1

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens of this step, the experts each wants, and their weights: whole numbers and halves."""
        generator = torch.Generator().manual_seed(self._step * self._seat.ranks + self._seat.rank)
        x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator).float()
        experts = torch.rand(TOKENS, self._experts, generator=generator).topk(TOPK, dim=1).indices
        weights = torch.randint(1, 5, (TOKENS, TOPK), generator=generator) / 2
        return x, experts, weights

    def _slots_of(self, experts: torch.Tensor, view: View) -> torch.Tensor:
        """The first copy of each expert that lies on an active rank, as the slot that dispatch wants."""
        table = []
        for expert in range(self._experts):
            owner, index = divmod(expert, EXPERTS_PER_RANK)
            neighbour = (owner + 1) % self._seat.ranks
            home = owner * SLOTS_PER_RANK + index
            copy = neighbour * SLOTS_PER_RANK + EXPERTS_PER_RANK + index
            table.append(home if owner in view.active else copy)
        return torch.tensor(table)[experts]


def _experts_held_by(rank: int, ranks: int) -> torch.Tensor:
    """The expert in each slot of a rank: its own, then the copies of its left neighbour's."""
    owners = (rank, (rank - 1) % ranks)
    return torch.tensor([owner * EXPERTS_PER_RANK + i for owner in owners for i in range(EXPERTS_PER_RANK)])


def _compute(
    held: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """What experts do here: expert ``e`` multiplies a token by ``e + 1``. Weighted and summed per token."""
    rows = (slots >= 0).any(dim=1).nonzero().squeeze(1)
    factors = (held[slots[rows].clamp(min=0)] + 1) * weights[rows]
    out[rows] = x[rows] * factors.where(slots[rows] >= 0, 0.0).sum(dim=1, keepdim=True)


def _expected(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the step must give, whichever rank computed it."""
    return x * ((experts + 1) * weights).sum(dim=1, keepdim=True)
