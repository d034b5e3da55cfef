"""The memory of a rank that left is unmapped beside the steps of the survivors, and before they close."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import eep
from eep.data_plane.memory.shm import SharedMemory
from tests import moe
from tests.rank_program import PATIENCE_S

CONFIG = moe.Config(ranks=2, max_ranks=2)


class Slow:
    """Memory that takes its time to be unmapped."""

    def __init__(self) -> None:
        self.may_end, self.is_unmapped = threading.Event(), threading.Event()

    def bytes_at(self, offset: int, size: int) -> Iterator[None]:
        mapping = self._mapping()
        next(mapping)
        return mapping

    def _mapping(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.may_end.wait(PATIENCE_S)
            self.is_unmapped.set()


def test_no_step_waits_for_memory_to_be_unmapped_before_the_end(
    rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    with CONFIG.buffer(0, rendezvous) as buffer:
        with CONFIG.buffer(1, rendezvous):
            buffer.connect_ranks([0, 1])
        monkeypatch.setattr(SharedMemory, "bytes_at", lambda _, offset, size: slow.bytes_at(offset, size))
        assert buffer.disconnect_ranks([1]).active == (0,)
        assert not slow.is_unmapped.is_set()
        join = threading.Thread.join

        def end_when_waited_for(thread: threading.Thread, timeout: float | None = None) -> None:
            if thread.name.startswith("eep-unmap"):
                slow.may_end.set()
            join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "join", end_when_waited_for)
    assert slow.is_unmapped.is_set()
