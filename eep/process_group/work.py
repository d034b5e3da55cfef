"""What a collective gives back: whether it is done, what went wrong, and who answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from eep.process_group.callback_threads import callbacks


class EepWork(Work):
    """Ends once, with the ranks that answered or with an exception, which :meth:`wait` raises."""

    def __init__(self, name: str, result: list[torch.Tensor]) -> None:
        super().__init__()
        self.name = name
        self.answered: tuple[int, ...] = ()
        """The ranks of the group whose part was taken. Slots of the others keep what the caller had put there."""
        self.source: int | None = None
        self.follow: Callable[[Callable[[], object]], None] = callbacks.run
        """Has the callbacks of its future run."""
        self._result = result
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = False
        self._waited: threading.Event | None = None
        self._over: torch.futures.Future[None] | None = None
        """Made with the future, which follows it."""
        self._future: torch.futures.Future[Any] | None = None

    def run(self, body: Callable[[], tuple[int, ...]]) -> None:
        """Does the work in this thread, and ends with what it gave or raised."""
        try:
            answered = body()
        except BaseException as error:
            self.end(error=error)
        else:
            self.end(answered)

    def end(self, answered: tuple[int, ...] = (), error: BaseException | None = None) -> None:
        with self._lock:
            if self._done:
                return
            self.answered, self._error, self._done = answered, error, True
            waited, over = self._waited, self._over
            follow, self.follow = self.follow, callbacks.run  # nothing that the call needed outlives it
        if waited is not None:
            waited.set()
        if over is not None:
            follow(lambda: over.set_result(None))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.wait_for_end(timeout)
        if self._error is not None:
            raise self._error
        return True

    def wait_for_end(self, timeout: timedelta | None = None) -> None:
        """Waits until the call is over, whether it went well or not."""
        with self._lock:
            if not self._done and self._waited is None:
                self._waited = threading.Event()
            waited = self._waited
        if waited is not None:
            limit = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            if not waited.wait(limit):
                raise TimeoutError(
                    f"{self.name} is not done after {limit} s; it goes on, so wait again or destroy the group"
                )

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        if self.source is None:
            raise RuntimeError(f"{self.name} has no source: it is not a receive, or has not ended yet")
        return self.source

    def source_rank(self) -> int:
        return self._source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its callbacks run in a thread of their own. If the call fails, it raises ``RuntimeError`` with the words of what
        :meth:`wait` raises: torch's C++ code, DDP's for one, takes no other exception for an error."""
        with self._lock:
            if self._future is not None:
                return self._future
            over = self._over = torch.futures.Future()
            self._future = over.then(self._outcome)
            done = self._done
        if done:
            over.set_result(None)
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result
