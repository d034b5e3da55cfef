"""The supervisor ends every wait of every plane itself, those of a rank that has just died among them.

On a GPU the kernels of a killed process run on for a moment. One that waits for a flag would wait until the driver takes its
memory away, and a fault then ends every process that shares the GPU through MPS.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from eep.control.supervisor.front_desk import open_shared_page
from eep.view import FOREVER
from tests.control import two_planes_rank
from tests.control.harness import kill, record, runs_with, supervised, until


class WatchedPage:
    """A rank's page, and which epochs the supervisor revoked in it."""

    def __init__(self, descriptor: int, revoked: list[int]) -> None:
        self._page, self._revoked = open_shared_page(descriptor), revoked

    def revoke(self, epoch: int) -> None:
        self._revoked.append(epoch)
        self._page.revoke(epoch)

    def close(self) -> None:
        self._page.close()


def test_both_pages_of_survivor_and_dead_are_revoked() -> None:
    pages: dict[int, list[int]] = defaultdict(list)

    def open_page(descriptor: int) -> WatchedPage:
        return WatchedPage(descriptor, pages[len(pages)])

    async def body() -> None:
        async with supervised(two_planes_rank.main, 2, forked=True, open_page=open_page) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            assert len(pages) == 4
            epoch = record(supervisor).view.epoch
            kill(supervisor, 1)
            await until(supervisor, runs_with(supervisor, (0,)))
            ended = [revoked for revoked in pages.values() if FOREVER in revoked]
            assert len(ended) == 2, "the planes of the dead rank"
            assert sum(epoch in revoked for revoked in pages.values()) == 4

    asyncio.run(body())
