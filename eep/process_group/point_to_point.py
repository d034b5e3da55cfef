"""Messages between two ranks of a group: send and receive, with tags, in any order, from one rank or from any.

Messages to one rank go out in the order they were sent, from a thread per destination: a message that is not received yet
holds up no other destination. One thread per group receives: it sets a message aside until a receive asks for it. A
message belongs to the view in which it was sent, and a receive to the view in which it was asked for. What a view leaves
undone ends with it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from eep.abi.collectives import MessageHeader
from eep.errors import EepError, StepFailed
from eep.process_group.call import check
from eep.process_group.lane import GroupEndpoint, Lane, overtaken
from eep.process_group.work import EepWork
from eep.view import View


@dataclass(slots=True, eq=False)
class _Posted:
    """A receive that waits for its message. ``source`` is None for a message of any rank."""

    epoch: int
    source: int | None
    tag: int
    tensor: torch.Tensor
    timeout: float
    deadline: float
    work: EepWork

    def takes(self, epoch: int, source: int, tag: int) -> bool:
        return epoch == self.epoch and tag == self.tag and self.source in (None, source)


class Messages:
    """The messages of one group. Ranks are those of the instance."""

    def __init__(self, endpoint: GroupEndpoint, lane: Lane, timeout: float) -> None:
        self.timeout = timeout
        self._endpoint, self._lane = endpoint, lane
        # Guards all that follows but what was set aside, which is the receiver's own. A caller that comes after the end is
        # told so under it: no thread serves what is put behind the end of a queue.
        self._changed = threading.Condition()
        self._senders: dict[int, queue.SimpleQueue[tuple[int, torch.Tensor, int, float, EepWork] | None]] = {}
        self._posted: list[_Posted] = []
        self._aside: list[tuple[int, int, torch.Tensor]] = []
        self._aside_epoch = -1
        self._receiver: threading.Thread | None = None
        self._closed = False

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float | None = None) -> EepWork:
        _check("send", tensor)
        work = EepWork(f"send to rank {to}", [tensor])
        with self._changed:
            self._refuse_if_closed("send")
            if to not in self._senders:
                self._senders[to] = queue.SimpleQueue()
                self._start(self._send_to, to)
            limit = self.timeout if timeout is None else timeout
            self._senders[to].put((self._lane.epoch, tensor, tag, limit, work))
        return work

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, timeout: float | None = None) -> EepWork:
        _check("recv", tensor)
        work = EepWork(f"recv from {'any rank' if source is None else f'rank {source}'}", [tensor])
        if source == self._endpoint.rank:
            work.end(error=ValueError(f"recv: rank {source} is this rank itself, which sends itself no messages"))
            return work
        with self._changed:
            self._refuse_if_closed("recv")
            limit = self.timeout if timeout is None else timeout
            deadline = time.monotonic() + limit
            self._posted.append(_Posted(self._lane.epoch, source, tag, tensor, limit, deadline, work))
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
            work = item[-1]
            work.run(partial(self._send, to, *item[:-1]))

    def _send(self, to: int, epoch: int, tensor: torch.Tensor, tag: int, timeout: float) -> tuple[int, ...]:
        size = tensor.numel() * tensor.element_size()
        self._lane.send(epoch, to, tag, tensor.data_ptr(), size, timeout)
        return (self._lane.ranks.index(to),)

    def _receive(self) -> None:
        while True:
            with self._changed:
                while not self._posted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                # A caller that asks or closes from here on pokes, and so ends the wait that follows.
                pokes, asked = self._lane.pokes(), list(self._posted)
            # Read after those who asked: none of them is of a later view.
            view = self._endpoint.view
            for posted in asked:
                if posted.epoch != view.epoch:
                    self._fail([posted], overtaken(posted.work.name, posted.epoch, view.epoch))
            try:
                self._look(view, [posted for posted in asked if posted.epoch == view.epoch], pokes)
            except Exception as error:
                self._fail(self._asked_in(view.epoch), error)
        self._fail(list(self._posted), EepError("recv: this process group was destroyed"))

    def _look(self, view: View, asked: list[_Posted], pokes: int) -> None:
        """Serves what can be served; then waits for a message, for a reason to stop, or for a new receiver. One that was
        ``asked`` for has seen all that was set aside when it is found to wait in vain."""
        active = self._lane.active() & ~(1 << self._endpoint.rank)  # which sends itself nothing
        if self._endpoint.view is not view:
            return
        if self._aside_epoch != view.epoch:
            self._aside, self._aside_epoch = [], view.epoch
        if (trouble := self._lane.trouble("recv")) is not None:
            raise trouble
        for source, tag, tensor in list(self._aside):
            if (posted := self._taker(view.epoch, source, tag)) is not None:
                self._aside = [kept for kept in self._aside if kept[2] is not tensor]
                self._deliver(posted, source, tensor)
        now = time.monotonic()
        left = self._lane.left(active)  # seen before the pipes are: what a rank had sent is in its pipe when it leaves
        if left and (message := self._lane.probe(view.epoch, left, pokes, 0.0)) is not None:
            self._take(view.epoch, message)
            return
        asked = [posted for posted in asked if not posted.work.is_completed()]
        for posted in asked:
            wanted = active if posted.source is None else 1 << posted.source
            if not wanted & active & ~left:
                gone = tuple(rank for rank in self._lane.ranks if wanted >> rank & 1)
                self._fail(
                    [posted], StepFailed(f"{posted.work.name}: its source is not in the view, or has left", gone)
                )
            elif now >= posted.deadline:
                silent = () if posted.source is None else (posted.source,)
                text = f"{posted.work.name}: nothing came within {posted.timeout:g} s"
                self._fail([posted], StepFailed(text, silent))
        if not (asked := [posted for posted in asked if not posted.work.is_completed()]):
            return
        sources = 0
        for posted in asked:
            sources |= active if posted.source is None else 1 << posted.source
        patience = min(posted.deadline for posted in asked) - now
        if (message := self._lane.probe(view.epoch, sources, pokes, patience)) is not None:
            self._take(view.epoch, message)

    def _take(self, epoch: int, message: MessageHeader) -> None:
        source, tag, size = int(message.source), int(message.tag), int(message.bytes)
        posted = self._taker(epoch, source, tag)
        if posted is not None and posted.tensor.numel() * posted.tensor.element_size() == size:
            if self._lane.receive(epoch, source, posted.tensor.data_ptr(), size, self.timeout):
                self._finish(posted, source)
            return
        # Not asked for yet, or of another size than was asked for: it must leave the pipe all the same.
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
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
                [posted], ValueError(f"{posted.work.name}: the message has {data.numel()} bytes, the tensor {size}")
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

    def _asked_in(self, epoch: int) -> list[_Posted]:
        return [posted for posted in list(self._posted) if posted.epoch == epoch]

    def _taker(self, epoch: int, source: int, tag: int) -> _Posted | None:
        return next((posted for posted in list(self._posted) if posted.takes(epoch, source, tag)), None)

    def _start(self, target: Callable[..., None], *args: int) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="eep-messages", daemon=True)
        thread.start()
        return thread

    def _refuse_if_closed(self, name: str) -> None:
        if self._closed:
            raise EepError(f"{name}: this process group was destroyed")


def _check(name: str, tensor: torch.Tensor) -> None:
    check(name, tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: the tensor of a message must be contiguous; call .contiguous() on it")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: messages are for CPU tensors; copy this one from {tensor.device} first")
