"""What becomes of a rank that is fenced before it has started, and what a machine must be able to do. With a launcher that is
made up; with real ones, see test_supervisor.py."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping

import pytest

from eep.control.launch.processes import Child, Processes, require_pidfds
from eep.errors import EepError


class Slow:
    """A launcher that never comes to an end."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def start(self, rank: int, incarnation: int, marks: Mapping[str, str]) -> Child:
        self.asked.append(rank)
        await asyncio.Event().wait()  # for ever
        raise AssertionError("this event is never set")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_rank_that_is_fenced_before_it_runs_has_ended(turns: int) -> None:
    """Also if its task has not had a first step: then nothing in it would ever run."""
    exits: list[tuple[int, int, bool]] = []

    async def run() -> tuple[bool, list[int]]:
        launcher = Slow()
        processes = Processes(
            launcher, {}, lambda rank, incarnation, evidence, clean: exits.append((rank, incarnation, clean))
        )
        processes.launch(3, 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        processes.fence(3, 1)
        for _ in range(4):
            await asyncio.sleep(0)
        return processes.all_ended, launcher.asked

    all_ended, asked = asyncio.run(run())
    assert exits == [(3, 1, False)]
    assert all_ended
    assert asked == ([3] if turns else []), "one that is fenced at once is not started"


@pytest.mark.parametrize(("module", "call"), [(os, "pidfd_open"), (signal, "pidfd_send_signal")])
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_a_filter_that_refuses_pidfds_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, module: object, call: str, code: int
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(code, os.strerror(code))

    require_pidfds()
    monkeypatch.setattr(module, call, refuse)
    with pytest.raises(EepError, match=rf"{os.strerror(code)}.*Linux 5.3 .*seccomp"):
        require_pidfds()
    monkeypatch.delattr(module, call)
    with pytest.raises(EepError, match="does not let a process watch others"):
        require_pidfds()
