"""Running the calls of a group, in order: in the caller's thread where it waits anyway, else in a thread of the group.

Calls on a GPU are only launched, so they are never queued: the stream keeps their order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from eep.process_group.call import Call
from eep.process_group.call_queue import CallQueue, QueuedCall
from eep.process_group.lane import Lane
from eep.process_group.work import EepWork

_RECENT = 256
_SMALL_BYTES = 64


class Runner:
    def __init__(self, name: str, lanes: Mapping[str, Lane]) -> None:
        """``lanes`` by kind of device, ``cpu`` among them."""
        self._name, self._lanes = name, lanes
        self._running = threading.Lock()
        self._queue = CallQueue()
        self._starting = threading.Lock()
        self._recent: deque[EepWork] = deque(maxlen=_RECENT)
        """Python's part of a work ends with its last user in Python. DDP's join gives the work of a sum of one number to C++
        code, drops it, and has it asked in the backward pass. So the latest works of such sizes are kept."""
        self._thread: threading.Thread | None = None

    def run(self, batch: list[Call], timeout: float, *, in_background: bool, epoch: int | None = None) -> EepWork:
        """The batch as one work, of the view of ``epoch`` where one is given."""
        name = batch[0].name if batch else "nothing"
        tensors = batch[0].tensors if len(batch) == 1 else [tensor for call in batch for tensor in call.tensors]
        work = EepWork(name, tensors)
        device = "cpu" if not tensors or tensors[0].is_cpu else tensors[0].device.type
        if device not in self._lanes:
            raise ValueError(
                f"{name}: this group takes tensors on {' and '.join(self._lanes)}, got one on {device}; see "
                "eep.pg.Options(devices=...)"
            )
        if device != "cpu":
            work.end(*self._outcome(batch, timeout, self._lanes[device], epoch))
            return work
        # A call may overtake no other: it runs here only if none is queued, and none can be queued to run beside it.
        if not in_background and self._running.acquire(blocking=False):
            try:
                if self._queue.unfinished == 0:
                    work.end(*self._outcome(batch, timeout, self._lanes["cpu"], epoch))
                    return work
            finally:
                self._running.release()
        call = QueuedCall(batch, timeout, work, self._lanes["cpu"].epoch if epoch is None else epoch)
        self._queue.put(call)
        with self._starting:
            if sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES:
                self._recent.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._queue.serve, args=(self._run_queued,), name=f"eep-group-{self._name}", daemon=True
                )
                self._thread.start()
        return work

    def close(self) -> None:
        """What is queued still runs, or fails as the lane is closed."""
        self._queue.close()

    def _run_queued(self, call: QueuedCall) -> None:
        with self._running:
            answered, error = self._outcome(call.batch, call.timeout, self._lanes["cpu"], call.epoch)
        call.work.end(answered, error)  # its callbacks may make calls, which run meanwhile

    def _outcome(
        self, batch: list[Call], timeout: float, lane: Lane, epoch: int | None
    ) -> tuple[tuple[int, ...], BaseException | None]:
        """Who answered, and what went wrong. ``epoch`` is given for what was queued, too: it belongs to the view in which it
        was called."""
        try:
            if epoch is None and len(batch) > 1:
                epoch = lane.epoch  # a batch is of one view, whether it was queued or not
            answered = lane.active()
            for call in batch:
                answered &= lane.call(call.name, call.args, timeout, epoch)
            for call in batch:
                if call.written:
                    call.finish()
        except BaseException as error:
            return (), error
        return lane.positions(answered), None
