"""Ranks that take a process which was prepared in advance: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from eep.control.launch import spare_launcher
from tests.control.harness import (
    PATIENCE,
    children_of,
    kill,
    record,
    runs_with,
    until,
)
from tests.control.launch.spare_harness import BOTH, a_spare, lines, ready, spared


@pytest.mark.parametrize("forked", [False, True])
def test_a_killed_rank_comes_back_as_the_spare_and_the_pool_refills(forked: bool) -> None:
    async def body() -> None:
        async with spared(forked=forked) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            assert len(lines(supervisor, "COLD")) == 2, "there was nothing to take at the start"
            spare = await a_spare(supervisor, launcher)
            assert os.getsid(spare) == spare
            assert spare in children_of(str(supervisor.directory.path)), "a keeper would not find it"
            assert (
                f'"spares":{{"kind":"warm","wanted":1,"ready":1,"preparing":0,"pids":[{spare}]}}' in supervisor.status()
            )
            killed = supervisor.pids[1]
            kill(supervisor, 1)
            await until(supervisor, runs_with(supervisor, (0,)))
            await until(supervisor, runs_with(supervisor, BOTH))
            assert supervisor.pids[1] == spare
            assert record(supervisor).view.incarnations == (0, 1)
            assert not Path(f"/proc/{killed}").exists(), "a zombie is left"
            (taken,) = [line for line in lines(supervisor, "SPARE") if line.rank == 1]
            assert (taken.incarnation, "was ready" in taken.cause) == (1, True)

            another = await a_spare(supervisor, launcher, (spare,))
            kill(supervisor, 1)  # what was a spare dies as any rank does
            await until(supervisor, lambda: supervisor.pids.get(1) == another)
            await until(supervisor, runs_with(supervisor, BOTH))
            assert record(supervisor).view.incarnations == (0, 2)

    asyncio.run(body())


@pytest.mark.parametrize("forked", [False, True])
def test_a_spare_that_dies_is_replaced_and_harms_no_rank(forked: bool) -> None:
    async def body() -> None:
        async with spared(spares=2, forked=forked) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            await until(supervisor, lambda: len(ready(launcher)) == 2)
            before, spares = record(supervisor), tuple(ready(launcher))
            os.kill(spares[0], signal.SIGKILL)
            await a_spare(supervisor, launcher, spares)
            assert record(supervisor) == before
            assert any(line.evidence == "SIGKILL" for line in lines(supervisor, "SPARE"))
            assert not Path(f"/proc/{spares[0]}").exists(), "a zombie is left"
            assert spares[1] in ready(launcher)

    asyncio.run(body())


def test_spares_end_with_the_process_that_forked_them_and_its_copy_forks_the_next() -> None:
    async def body() -> None:
        async with spared(forked=True) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            spare, forks = await a_spare(supervisor, launcher), launcher.forks
            assert forks is not None
            await until(supervisor, lambda: forks.copy_pid is not None)
            before, server = record(supervisor), forks.server_pid
            assert server is not None
            os.kill(server, signal.SIGKILL)
            await a_spare(supervisor, launcher, (spare,))
            assert forks.server_pid != server
            assert record(supervisor) == before, "no rank is harmed"

    asyncio.run(body())


def test_a_spare_that_dies_with_its_order_is_a_rank_that_died() -> None:
    async def body() -> None:
        async with spared() as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            spare = await a_spare(supervisor, launcher)
            os.kill(spare, signal.SIGSTOP)  # it will never read its order
            kill(supervisor, 0)
            await until(supervisor, lambda: supervisor.pids.get(0) == spare)
            os.kill(spare, signal.SIGKILL)
            await until(supervisor, runs_with(supervisor, BOTH))
            assert supervisor.pids[0] != spare
            assert supervisor.state.ranks[0].failures == 2
            assert lines(supervisor, "COLD")[-1].rank == 0, "the pool was empty"

    asyncio.run(body())


def test_a_spare_that_has_just_died_is_passed_over() -> None:
    async def body() -> None:
        async with spared() as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            spare = await a_spare(supervisor, launcher)
            os.kill(spare, signal.SIGKILL)
            os.waitid(os.P_PID, spare, os.WEXITED | os.WNOWAIT)  # dead, and the launcher has had no chance to see it
            child = await launcher.start(7, 0, {"EEP_CONTROL_DIR": str(supervisor.directory.path)})
            assert child.pid != spare
            assert lines(supervisor, "COLD")[-1].rank == 7
            os.kill(child.pid, signal.SIGKILL)
            assert await child.exit_code()  # by our hand, or by its own: nothing told it which rank it is
            os.close(child.pidfd)

    asyncio.run(body())


@pytest.mark.parametrize(("free_cores", "at_once"), [(0, 1), (2, 2)])
def test_how_many_are_prepared_at_once_depends_on_the_cores(free_cores: int, at_once: int) -> None:
    async def body() -> None:
        preload = ("tests.control.launch.gated_import",)
        async with spared(spares=2, preload=preload, free_cores=free_cores) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            await until(supervisor, lambda: launcher.status()["preparing"] == at_once)
            (supervisor.directory.path / "open").touch()
            await until(supervisor, lambda: len(ready(launcher)) == 2)

    asyncio.run(body())


def test_an_order_reaches_a_spare_that_is_still_importing() -> None:
    async def body() -> None:
        preload = ("tests.control.launch.gated_import", "no.such.module")
        async with spared(preload=preload) as (supervisor, _):
            await until(supervisor, runs_with(supervisor, BOTH))
            directory = supervisor.directory.path
            async with asyncio.timeout(PATIENCE):
                while not (importing := list(directory.glob("importing-*"))):
                    await asyncio.sleep(0.01)
            spare = int(importing[0].name.partition("-")[2])
            kill(supervisor, 1)
            await until(supervisor, lambda: supervisor.pids.get(1) == spare)
            (directory / "open").touch()
            await until(supervisor, runs_with(supervisor, BOTH))
            assert record(supervisor).view.incarnations == (0, 1)

    asyncio.run(body())


@pytest.mark.parametrize("forked", [False, True])
def test_a_spare_that_is_bound_becomes_its_own_rank_and_no_other(forked: bool) -> None:
    async def body() -> None:
        warm = "tests.control.ranks:steady_once_it_is_told"
        async with spared(spares=2, warm=warm, binds=True, forked=forked) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            for number, rank in enumerate((1, 0, 1)):
                await until(supervisor, lambda: len(ready(launcher)) == 2)
                place = supervisor.directory.path
                bound = {int((place / f"for-{pid}").read_text()): pid for pid in ready(launcher)}
                assert set(bound) == {0, 1}
                kill(supervisor, rank)
                await until(supervisor, lambda rank=rank, bound=bound: supervisor.pids.get(rank) == bound[rank])
                await until(supervisor, runs_with(supervisor, BOTH))
                assert bound[1 - rank] in ready(launcher), "the other one still waits"
                assert len([line for line in lines(supervisor, "SPARE") if line.rank is not None]) == number + 1
            assert len(lines(supervisor, "COLD")) == 2, "at the start"

    asyncio.run(body())


def test_a_rank_has_a_second_spare_when_all_have_one() -> None:
    async def body() -> None:
        warm = "tests.control.ranks:steady_once_it_is_told"
        async with spared(spares=3, warm=warm, binds=True) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            await until(supervisor, lambda: len(ready(launcher)) == 3)
            place = supervisor.directory.path
            bound = sorted(int((place / f"for-{pid}").read_text()) for pid in ready(launcher))
            assert bound in ([0, 0, 1], [0, 1, 1])

    asyncio.run(body())


def test_a_bound_spare_ends_when_its_rank_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_launcher, "KEPT_FOR", 0.3)

    async def body() -> None:
        warm = "tests.control.ranks:steady_once_it_is_told"
        async with spared(spares=2, warm=warm, binds=True, relaunch_limit=0) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            await until(supervisor, lambda: len(ready(launcher)) == 2)
            kill(supervisor, 1)
            await until(supervisor, lambda: len(ready(launcher)) == 1)
            (line,) = [line for line in lines(supervisor, "SPARE") if "has not come back" in line.cause]
            assert line.rank == 1
            await asyncio.sleep(0.5)
            assert len(ready(launcher)) == 1, "none is prepared for a rank that is not there"

    asyncio.run(body())
