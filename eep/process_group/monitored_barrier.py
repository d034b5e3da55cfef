"""A barrier that names the ranks that do not come in time, with the words of gloo's.

Every member sends a message to the first one that is in the view, and waits for its answer. The first answers when it has
heard of all. A wait that ends in vain condemns no rank: the group goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from eep.errors import StepFailed
from eep.process_group.lane import Lane, overtaken
from eep.process_group.point_to_point import Messages
from eep.process_group.work import EepWork

_TAGS = 1 << 62
"""Beyond those that torch gives messages."""


class MonitoredBarrier:
    """The barriers of one group. Ranks are those of the instance, and in what is said those of the group."""

    def __init__(self, messages: Messages, lane: Lane) -> None:
        self._messages, self._lane = messages, lane
        self._epoch, self._count = -1, 0

    def run(self, me: int, timeout: float, wait_all: bool) -> None:
        """Returns when all members that are in the view have come. ``wait_all``: names all that have not, and not only the
        first of them."""
        tag, mask = self._next_tag(), self._lane.active()
        first, *others = (rank for rank in self._lane.ranks if mask >> rank & 1)
        end = time.monotonic() + timeout
        if me == first:
            self._gather(first, others, tag, timeout, end, wait_all)
        else:
            self._report(me, first, tag, timeout, end)

    def _report(self, me: int, first: int, tag: int, timeout: float, end: float) -> None:
        try:
            answer = self._messages.receive(_token(), first, tag, timeout)
            self._check_view()
            self._messages.send(_token(), first, tag, timeout)
            _wait(answer, end)
        except (StepFailed, TimeoutError) as error:
            text = (
                f"Rank {self._place(me)} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {self._place(first)}, which knows who did not come: {error}"
            )
            raise _like(error)(text, getattr(error, "ranks", ())) from error

    def _gather(self, first: int, others: Sequence[int], tag: int, timeout: float, end: float, wait_all: bool) -> None:
        reports = {rank: self._messages.receive(_token(), rank, tag, timeout) for rank in others}
        self._check_view()
        failed: dict[int, Exception] = {}
        for rank, report in reports.items():
            if not wait_all and not failed and time.monotonic() >= end:
                raise StepFailed(
                    f"Rank {self._place(first)} timed out in monitoredBarrier after {_milliseconds(timeout)} ms"
                )
            try:
                _wait(report, end)
            except (StepFailed, TimeoutError) as error:
                failed[rank] = error
                if not wait_all:
                    break
        if failed:
            raise self._failure(first, failed, timeout)
        for rank in others:
            self._messages.send(_token(), rank, tag, timeout)

    def _failure(self, first: int, failed: dict[int, Exception], timeout: float) -> StepFailed:
        names = ", ".join(str(self._place(rank)) for rank in failed)
        error = next(iter(failed.values()))
        text = (
            f"[Rank {self._place(first)}]: Rank{'s' * (len(failed) > 1)} {names} failed to pass monitoredBarrier in "
            f"{_milliseconds(timeout)} ms: {error}"
        )
        return _like(error)(text, getattr(error, "ranks", ()) or tuple(failed))

    def _next_tag(self) -> int:
        """The barriers of a view are counted: a late message of one does not let a rank pass the next. A rank that missed
        one is behind until the next view."""
        if self._epoch != self._lane.epoch:
            self._epoch, self._count = self._lane.epoch, 0
        self._count += 1
        return _TAGS + self._count

    def _check_view(self) -> None:
        """That the receives belong to the view whose barriers were counted. From here on they end with it."""
        if self._epoch != self._lane.epoch:
            raise overtaken("monitored_barrier", self._epoch, self._lane.epoch)

    def _place(self, rank: int) -> int:
        return self._lane.ranks.index(rank)


def _wait(work: EepWork, end: float) -> None:
    work.wait(timedelta(seconds=max(1e-6, end - time.monotonic())))


def _like(error: Exception) -> type[StepFailed]:
    return type(error) if isinstance(error, StepFailed) else StepFailed


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
