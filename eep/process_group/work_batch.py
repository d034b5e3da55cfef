"""Several works as one, which is over when all of them are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from eep.process_group.work import EepWork

_NONE = timedelta(0)
_SHORTEST = timedelta(microseconds=1)


class WorkBatch(Work):
    """:meth:`wait` raises what the first of those raised that failed, and only when none is under way any more: until then
    a message may still arrive in one of its tensors."""

    def __init__(self, works: Sequence[EepWork]) -> None:
        super().__init__()
        self._works = list(works)

    @property
    def answered(self) -> tuple[int, ...]:
        """The ranks of the group whose part was taken by any of the calls."""
        return tuple(sorted({rank for work in self._works for rank in work.answered}))

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout if timeout is not None and timeout > _NONE else None
        begin = time.monotonic()
        for work in self._works:
            spent = timedelta(seconds=time.monotonic() - begin)
            work.wait_for_end(None if limit is None else max(limit - spent, _SHORTEST))
        if (error := self.exception()) is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        over = torch.futures.collect_all([work.get_future() for work in self._works])
        return over.then(self._outcome)

    def _outcome(self, over: torch.futures.Future[Any]) -> list[torch.Tensor]:
        over.value()  # raises where one of them has failed
        return self.result()
