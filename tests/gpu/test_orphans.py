"""Kernels that a killed rank leaves on a GPU which others share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.control.harness import kill, patient_policy, record, runs_with, supervised, until
from tests.gpu import orphan_ranks

pytestmark = pytest.mark.timeout(300)
KILLS = 4


def test_a_kill_with_work_outstanding_harms_no_other_rank() -> None:
    async def body() -> None:
        async with supervised(orphan_ranks.main, 2, policy=patient_policy(2, relaunch_limit=KILLS)) as supervisor:
            for life in range(KILLS):
                await until(supervisor, runs_with(supervisor, (0, 1)))
                assert record(supervisor).view.incarnations == (0, life)
                busy = supervisor.directory.path / f"busy-1-{life}"
                await until_there(busy)
                kill(supervisor, 1)
                await until(supervisor, lambda life=life: record(supervisor).view.incarnations[1] > life)
            await until(supervisor, runs_with(supervisor, (0, 1)))
            assert record(supervisor).view.incarnations == (0, KILLS)

    asyncio.run(body())


async def until_there(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.002)
