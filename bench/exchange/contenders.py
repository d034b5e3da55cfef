"""The contenders, which move the same bytes: EEP, gloo, and a plain copy.

Each moves one row per token and rank that hosts one of its experts, the sender itself included. EEP finds out
which rows those are, sends the routing along and adds up the partial sums. Gloo gets rows that were packed
beforehand and only moves them; memcpy only copies them within the process. So the comparison never flatters
EEP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from bench.exchange.workload import SCALE_GROUP, Workload
from eep import Buffer


class Contender(ABC):
    """One way to exchange a workload. The benchmark times ``dispatch`` and ``combine`` alone."""

    @abstractmethod
    def dispatch(self) -> None:
        """Brings tokens to their experts."""

    @abstractmethod
    def experts(self) -> None:
        """Rewrites what combine will send, so that it is in the cache of its writer, as after real experts."""

    @abstractmethod
    def combine(self) -> None:
        """Brings partial sums back to their tokens."""

    @abstractmethod
    def verify(self) -> None:
        """Raises if the last round delivered anything but what was sent."""


class Eep(Contender):
    """``Buffer.dispatch`` and ``Buffer.combine`` in the rank layout, experts writing where the peers read."""

    def __init__(self, work: Workload, buffer: Buffer) -> None:
        self._work = work
        self._buffer = buffer
        self._weights = torch.full(work.topk_idx.shape, 1 / work.shape.topk)
        self._out = torch.empty(work.tokens, work.shape.hidden, dtype=buffer.combine_dtype)
        self.dispatch()
        self._rows = self._tokens.rows()
        # Each rank answers with its own number plus one, so that a sum shows which ranks took part in it.
        shape = (len(self._rows), work.shape.hidden)
        self._answers = torch.full(shape, work.rank + 1, dtype=buffer.combine_dtype)
        self.experts()
        self.combine()

    def dispatch(self) -> None:
        self._tokens = self._buffer.dispatch(self._work.x, self._work.topk_idx, self._weights)

    def experts(self) -> None:
        self._buffer.combine_input().index_copy_(0, self._rows, self._answers)

    def combine(self) -> None:
        self._buffer.combine(self._buffer.combine_input(), self._tokens, out=self._out)

    def verify(self) -> None:
        self._buffer.status().raise_if_bad()
        work, expected_rows = self._work, 0
        for rank in range(work.ranks):
            sender = work.of(rank)
            sent = sender.hosts[:, work.rank].nonzero().squeeze(1)
            expected_rows += len(sent)
            self._compare(self._received(rank)[sent], sender.x[sent].float())
        if expected_rows != len(self._rows):
            raise AssertionError(f"rank {work.rank} received {len(self._rows)} rows; its peers sent {expected_rows}")
        numbers = torch.arange(1, work.ranks + 1, dtype=torch.float32)
        sums = (work.hosts.float() @ numbers)[:, None].expand(-1, work.shape.hidden)
        if not torch.equal(self._out.float(), sums):
            raise AssertionError(f"combine on rank {work.rank} gave other sums than those of what the experts wrote")

    def _received(self, rank: int) -> torch.Tensor:
        """The rows of one source as numbers. All ranks here are first incarnations, so that slot == rank."""
        tokens, begin = self._tokens, rank * self._buffer.max_tokens
        rows = slice(begin, begin + self._work.tokens)
        x = tokens.x[rows].float()
        if tokens.scales is None:
            return x
        scales = tokens.scales[rows]
        if scales.dtype == torch.uint8:
            scales = (scales.int() << 23).view(torch.float32)
        return x * scales.repeat_interleave(SCALE_GROUP, dim=1)

    def _compare(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        # e4m3 keeps three bits after the leading one, so it may be wrong by half a step of them.
        tolerance = 2**-4 if self._work.shape.wire.startswith("fp8") else 0.0
        if not torch.allclose(received, sent, rtol=tolerance, atol=0.0):
            raise AssertionError(f"rank {self._work.rank} received a row that differs from what its peer sent")


class Gloo(Contender):
    """``all_to_all_single`` over rows packed beforehand, there and back."""

    def __init__(self, work: Workload) -> None:
        there, back = work.shape.dispatch_row_bytes, work.shape.combine_row_bytes
        rows_from = [work.of(rank).rows_to[work.rank] for rank in range(work.ranks)]
        self._there = _Exchange([rows * there for rows in work.rows_to], [rows * there for rows in rows_from])
        self._back = _Exchange([rows * back for rows in rows_from], [rows * back for rows in work.rows_to])

    def dispatch(self) -> None:
        self._there.run()

    def experts(self) -> None:
        self._back.sent.fill_(1)

    def combine(self) -> None:
        self._back.run()

    def verify(self) -> None:
        self._there.verify()
        self._back.verify()


class _Exchange:
    def __init__(self, send_bytes: list[int], receive_bytes: list[int]) -> None:
        self.sent = torch.ones(sum(send_bytes), dtype=torch.uint8)
        self._received = torch.zeros(sum(receive_bytes), dtype=torch.uint8)
        self._send_bytes, self._receive_bytes = send_bytes, receive_bytes

    def run(self) -> None:
        dist.all_to_all_single(self._received, self.sent, self._receive_bytes, self._send_bytes)

    def verify(self) -> None:
        _check_all_ones(self._received)


class Memcpy(Contender):
    """A copy of the bytes that this rank sends, and one of those that it gets back, within its own memory."""

    def __init__(self, work: Workload) -> None:
        self._there = torch.zeros(2, work.rows * work.shape.dispatch_row_bytes, dtype=torch.uint8)
        self._back = torch.zeros(2, work.rows * work.shape.combine_row_bytes, dtype=torch.uint8)
        self._there[0] = 1

    def dispatch(self) -> None:
        self._there[1].copy_(self._there[0])

    def experts(self) -> None:
        self._back[0].fill_(1)

    def combine(self) -> None:
        self._back[1].copy_(self._back[0])

    def verify(self) -> None:
        _check_all_ones(self._there[1])
        _check_all_ones(self._back[1])


def _check_all_ones(received: torch.Tensor) -> None:
    if not bool((received == 1).all()):
        raise AssertionError("the received bytes differ from those that were sent")
