"""Running the calls of a group, in order: in the caller's thread where it waits anyway, else in a thread of the group.

Calls on a GPU are only launched, so they are never queued: the stream keeps their order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from eep.process_group.calls import Call
from eep.process_group.lane import Lane
from eep.process_group.work import EepWork


class Runner:
    def __init__(self, name: str, lanes: Mapping[str, Lane]) -> None:
        """``lanes`` by kind of device, ``cpu`` among them."""
        self._name, self._lanes = name, lanes
        self._running = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[list[Call], float, EepWork] | None] = queue.SimpleQueue()
        self._queued = 0
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, batch: list[Call], timeout: float, *, in_background: bool) -> EepWork:
        """The batch as one work."""
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
            self._execute(batch, timeout, work, self._lanes[device])
            return work
        # Ahead of nobody: a call may run here only if none is queued, and none can be while it runs.
        if not in_background and self._running.acquire(blocking=False):
            try:
                if self._queued == 0:
                    self._execute(batch, timeout, work, self._lanes["cpu"])
                    return work
            finally:
                self._running.release()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"eep-group-{self._name}", daemon=True)
            self._thread.start()
        with self._counting:
            self._queued += 1
        self._queue.put((batch, timeout, work))
        return work

    def close(self) -> None:
        """What is queued still runs, or fails as the lane is closed."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._running:
                self._execute(*item, self._lanes["cpu"])
            with self._counting:
                self._queued -= 1

    def _execute(self, batch: list[Call], timeout: float, work: EepWork, lane: Lane) -> None:
        try:
            answered = lane.active()
            for call in batch:
                answered &= lane.call(call.name, call.args, timeout)
        except BaseException as error:
            work.end(error=error)
        else:
            work.end(lane.positions(answered))
