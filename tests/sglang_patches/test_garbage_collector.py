"""The garbage collector leaves out what a process has when it is up. Needs no SGLang."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from sglang_patches import garbage_collector


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


class Node:
    """In a circle, which only the collector can take apart."""

    lives = 0

    def __init__(self) -> None:
        self.itself = self
        Node.lives += 1

    def __del__(self) -> None:
        Node.lives -= 1


def test_what_is_here_is_left_out_but_not_what_is_garbage() -> None:
    Node()
    garbage_collector.freeze_this_process(collect=True)
    assert gc.get_freeze_count() > 1000
    assert Node.lives == 0


def test_what_comes_later_is_collected() -> None:
    garbage_collector.freeze_this_process()
    Node()
    gc.collect()
    assert Node.lives == 0


def test_the_front_end_tells_all_that_it_serves_with() -> None:
    class Manager:
        def __init__(self) -> None:
            self.event_loop = asyncio.get_running_loop()
            self.told = asyncio.Event()

        async def freeze_gc(self) -> None:
            self.told.set()

    async def serve() -> None:
        manager = Manager()
        garbage_collector.freeze_server(manager)
        await asyncio.wait_for(manager.told.wait(), 5)

    asyncio.run(serve())
