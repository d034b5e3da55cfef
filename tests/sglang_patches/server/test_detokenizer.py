"""The process of the detokenizer is replaced when it ends: real processes, real SIGKILL."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_patches.server import detokenizer
from sglang_patches.server.detokenizer import Detokenizer, pause_before

PATIENCE = 60.0


class Processes:
    """Starts them, and writes down in which order things happen."""

    def __init__(self, run: Callable[..., object], *arguments: object) -> None:
        self.told: list[str] = []
        self.started: list[Any] = []
        self._run, self._arguments = run, arguments
        self._context = multiprocessing.get_context("fork")

    def start(self) -> Any:
        process = self._context.Process(target=self._run, args=self._arguments)
        process.start()
        self.started.append(process)
        self.told.append("started")
        return process

    def watched(self, loop: asyncio.AbstractEventLoop, limit: int) -> Detokenizer:
        watched = Detokenizer(self.start(), self.start)
        watched.watch(loop, lambda: self.told.append("gone"), self.told.append, limit)
        return watched

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.join()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_next_one_is_started_when_the_requests_have_moved() -> None:
    async def body() -> None:
        processes = Processes(time.sleep, 600)
        try:
            watched = processes.watched(asyncio.get_running_loop(), limit=9)
            for count in (2, 3):
                os.kill(watched.pid, signal.SIGKILL)
                await until(lambda count=count: len(processes.started) == count)  # type: ignore[misc]
                assert watched.is_alive(), "SGLang would end the server"
                assert watched.exitcode is None
                assert watched.pid == processes.started[-1].pid
            assert processes.told == ["started", *["gone", "started"] * 2]
            watched.stop()
            watched.stop()
            os.kill(watched.pid, signal.SIGKILL)
            processes.started[-1].join()
            await asyncio.sleep(0)
            assert len(processes.started) == 3, "its end was expected"
        finally:
            processes.end()

    asyncio.run(body())


def test_one_that_ended_before_it_was_watched_is_replaced_too() -> None:
    async def body() -> None:
        processes = Processes(time.sleep, 600)
        try:
            first = Detokenizer(processes.start(), processes.start)
            processes.started[0].kill()
            processes.started[0].join()
            assert not first.is_alive(), "SGLang may end a server that has not served yet"
            assert first.exitcode == -signal.SIGKILL
            first.watch(asyncio.get_running_loop(), lambda: processes.told.append("gone"), print, 9)
            await until(lambda: len(processes.started) == 2)
            assert processes.told == ["started", "gone", "started"]
            first.stop()
        finally:
            processes.end()

    asyncio.run(body())


def test_the_server_resigns_when_no_detokenizer_lives() -> None:
    async def body() -> None:
        processes = Processes(int)  # ends at once
        try:
            processes.watched(asyncio.get_running_loop(), limit=2)
            await until(lambda: any("in a row" in each for each in processes.told))
            assert processes.told[:-1] == ["started", *["gone", "started"] * 2, "gone"]
        finally:
            processes.end()

    asyncio.run(body())


def test_a_start_that_fails_is_tried_again() -> None:
    async def body() -> None:
        processes, failures = Processes(time.sleep, 600), [OSError("no memory"), RuntimeError("no thread")]

        def start() -> Any:
            if failures:
                raise failures.pop()
            return processes.start()

        try:
            watched = Detokenizer(processes.start(), start)
            watched.watch(asyncio.get_running_loop(), lambda: processes.told.append("gone"), print, 9)
            os.kill(watched.pid, signal.SIGKILL)
            await until(lambda: len(processes.started) == 2)
            assert processes.told == ["started", "gone", "started"]
            watched.stop()
        finally:
            processes.end()

    asyncio.run(body())


def test_starts_wait_longer_and_longer() -> None:
    pauses = [pause_before(start) for start in range(1, 100)]
    assert pauses[:3] == [0.0, 0.1, 0.2]
    assert max(pauses) == pauses[-1] == 5.0


def test_an_exception_in_the_detokenizer_ends_it_alone() -> None:
    def fails(_manager: object) -> None:
        raise KeyError("a text that cannot be decoded")

    with pytest.raises(SystemExit) as ended:
        detokenizer._end_alone(fails, None)
    assert ended.value.code == 1
