"""Messages between two ranks of a group: send and receive, with tags, in any order, from anybody.

Messages to one rank go out in the order they were sent, from a thread per destination: one that nobody receives yet holds
up no other. One thread per group receives: what nobody has asked for is set aside until somebody does. A message belongs to
the view in which it was sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eep.collective_abi import Message
from eep.endpoint import Endpoint
from eep.errors import EepError, StepFailed
from eep.process_group.calls import check
from eep.process_group.lane import Lane
from eep.process_group.work import EepWork


@dataclass(slots=True, eq=False)
class _Posted:
    """Somebody waits for a message. ``source`` is None for anybody's."""

    source: int | None
    tag: int
    tensor: torch.Tensor
    deadline: float
    work: EepWork

    def takes(self, source: int, tag: int) -> bool:
        return tag == self.tag and self.source in (None, source)


class Messages:
    """The messages of one group. Ranks are those of the instance."""

    def __init__(self, endpoint: Endpoint, lane: Lane, timeout: float) -> None:
        self.timeout = timeout
        self._endpoint, self._lane = endpoint, lane
        self._senders: dict[int, queue.SimpleQueue[tuple[torch.Tensor, int, EepWork] | None]] = {}
        self._changed = threading.Condition()
        self._posted: list[_Posted] = []
        self._aside: list[tuple[int, int, torch.Tensor]] = []
        self._aside_epoch = -1
        self._receiver: threading.Thread | None = None
        self._closed = False

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> EepWork:
        _check("send", tensor)
        work = EepWork(f"send to rank {to}", [tensor])
        self._refuse_if_closed("send")
        if to not in self._senders:
            self._senders[to] = queue.SimpleQueue()
            self._start(self._send_to, to)
        self._senders[to].put((tensor, tag, work))
        return work

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> EepWork:
        _check("recv", tensor)
        work = EepWork(f"recv from {'any rank' if source is None else f'rank {source}'}", [tensor])
        self._refuse_if_closed("recv")
        with self._changed:
            self._posted.append(_Posted(source, tag, tensor, time.monotonic() + self.timeout, work))
            if self._receiver is None:
                self._receiver = self._start(self._receive)
            self._changed.notify_all()
        self._lane.poke()
        return work

    def close(self) -> None:
        """What is still posted ends with an error; what is being sent ends with the lane's waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sender in self._senders.values():
            sender.put(None)
        self._lane.poke()

    def _send_to(self, to: int) -> None:
        while (item := self._senders[to].get()) is not None:
            tensor, tag, work = item

            def body(tensor: torch.Tensor = tensor, tag: int = tag) -> tuple[int, ...]:
                size = tensor.numel() * tensor.element_size()
                self._lane.send(to, tag, tensor.data_ptr(), size, self.timeout)
                return (self._lane.ranks.index(to),)

            work.run(body)

    def _receive(self) -> None:
        while True:
            with self._changed:
                while not self._posted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
            pokes = self._lane.pokes()
            try:
                self._look(pokes)
            except Exception as error:
                self._fail(list(self._posted), error)
        self._fail(list(self._posted), EepError("recv: this process group was destroyed"))

    def _look(self, pokes: int) -> None:
        """Serves what can be served; then waits for a message, for a reason to stop, or for a new receiver."""
        view, active = self._endpoint.view, self._lane.active()
        if self._aside_epoch != view.epoch:
            self._aside, self._aside_epoch = [], view.epoch
        if (trouble := self._lane.trouble("recv")) is not None:
            raise trouble
        for source, tag, tensor in list(self._aside):
            if (posted := self._taker(source, tag)) is not None:
                self._aside = [kept for kept in self._aside if kept[2] is not tensor]
                self._deliver(posted, source, tensor)
        now = time.monotonic()
        posted_now = list(self._posted)
        for posted in posted_now:
            wanted = active if posted.source is None else 1 << posted.source
            if not wanted & active or self._all_left(wanted & active):
                self._fail([posted], StepFailed(f"{posted.work.name}: it is not in the view, or has left"))
            elif now >= posted.deadline:
                self._fail([posted], StepFailed(f"{posted.work.name}: nothing came within {self.timeout:.0f} s"))
        if not self._posted:
            return
        sources = 0
        for posted in self._posted:
            sources |= active if posted.source is None else 1 << posted.source
        patience = min(posted.deadline for posted in self._posted) - now
        if (message := self._lane.probe(view.epoch, sources, pokes, patience)) is not None:
            self._take(view.epoch, message)

    def _take(self, epoch: int, message: Message) -> None:
        source, tag, size = int(message.source), int(message.tag), int(message.bytes)
        posted = self._taker(source, tag)
        if posted is not None and posted.tensor.numel() * posted.tensor.element_size() == size:
            if self._lane.receive(epoch, source, posted.tensor.data_ptr(), size, self.timeout):
                self._finish(posted, source)
            return
        # Not asked for yet, or of another size than was asked for: it must leave the pipe all the same.
        tensor = torch.empty(size, dtype=torch.uint8)
        if not self._lane.receive(epoch, source, tensor.data_ptr(), size, self.timeout):
            return
        if posted is None:
            self._aside.append((source, tag, tensor))
        else:
            self._deliver(posted, source, tensor)

    def _deliver(self, posted: _Posted, source: int, data: torch.Tensor) -> None:
        size = posted.tensor.numel() * posted.tensor.element_size()
        if data.numel() != size:
            self._fail(
                [posted], ValueError(f"{posted.work.name}: a message of {data.numel()} bytes, where {size} were due")
            )
            return
        posted.tensor.view(-1).view(torch.uint8).copy_(data)
        self._finish(posted, source)

    def _finish(self, posted: _Posted, source: int) -> None:
        with self._changed:
            self._posted.remove(posted)
        posted.work.source = self._lane.ranks.index(source)
        posted.work.end((posted.work.source,))

    def _fail(self, failed: list[_Posted], error: Exception) -> None:
        for posted in failed:
            with self._changed:
                self._posted.remove(posted)
            posted.work.end(error=error)

    def _taker(self, source: int, tag: int) -> _Posted | None:
        return next((posted for posted in list(self._posted) if posted.takes(source, tag)), None)

    def _all_left(self, ranks: int) -> bool:
        peers = self._endpoint._peers
        return all(peers.has_left(rank) for rank in range(self._endpoint.max_ranks) if ranks >> rank & 1)

    def _start(self, target: Callable[..., None], *args: int) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="eep-messages", daemon=True)
        thread.start()
        return thread

    def _refuse_if_closed(self, name: str) -> None:
        if self._closed:
            raise EepError(f"{name}: this process group was destroyed")


def _check(name: str, tensor: torch.Tensor) -> None:
    check(name, tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: messages are for CPU tensors; copy this one from {tensor.device} first")
