"""How the order of a rank reaches a spare, and how spares end: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eep.control.launch.processes import RANK, Child, entry_name, readable
from eep.control.launch.refill import Refill
from eep.control.launch.spare import Spare, StartedSpares
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.launch.spare_order import MAX_ORDER
from eep.membership import RankStatus
from tests.control import ranks
from tests.control.harness import (
    PATIENCE,
    ROOT,
    is_running,
    kill,
    runs_with,
    until,
    until_gone,
)
from tests.control.launch.spare_harness import BOTH, a_spare, lines, ready, spared


async def end_of(child: Child) -> int | None:
    async with asyncio.timeout(PATIENCE):
        await readable(child.pidfd)
    os.close(child.pidfd)
    return await child.exit_code()


async def until_started(launcher: SpareLauncher, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(launcher._pool) < count:
            await asyncio.sleep(0)


def test_an_order_reaches_a_spare_that_has_just_become_ready(tmp_path: Path) -> None:
    """It has said that it is ready, and is taken before the launcher has read that."""

    async def body() -> None:
        at_once = Refill(1, settles_within=0.0)
        launcher = SpareLauncher(
            entry_name(ranks.leaves_a_mark), {"directory": str(tmp_path)}, refill=at_once, source=StartedSpares()
        )
        first = await launcher.start(0, 0, {RANK: "0"})
        await until_started(launcher, 1)
        (spare,) = launcher._pool
        pid = spare.child.pid
        assert select.select([spare._socket], [], [], PATIENCE)[0]  # without the loop, which would read it
        os.kill(pid, signal.SIGSTOP)  # it reads when all is sent and closed
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        child = await launcher.start(1, 0, {RANK: "1"})
        os.kill(pid, signal.SIGCONT)
        try:
            assert child.pid == pid
            assert (await end_of(first), await end_of(child)) == (0, 0)
            assert (tmp_path / "ran-1").read_text() == str(pid)
        finally:
            await launcher.close()

    asyncio.run(body())


def test_a_spare_may_end_while_the_launcher_is_closed() -> None:
    """And none that ends then is told of: it is what was wanted."""

    async def body() -> None:
        at_once = Refill(2, free_cores=2, settles_within=0.0)
        launcher = SpareLauncher(
            entry_name(ranks.sleeps), refill=at_once, source=StartedSpares(["tests.control.launch.slow_import"])
        )
        told: list[str] = []
        launcher.follow(lambda _: None, lambda phase, *_, **__: told.append(phase))
        rank = await launcher.start(0, 0, {})
        await until_started(launcher, 2)
        spares = [spare.child.pid for spare in launcher._pool]
        os.kill(spares[1], signal.SIGKILL)
        os.waitid(os.P_PID, spares[1], os.WEXITED | os.WNOWAIT)  # dead, and the launcher has had no chance to see it
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        try:
            await launcher.close()
            assert not faults
            assert told == ["COLD"]
            assert not any(Path(f"/proc/{pid}").exists() for pid in spares), "a zombie is left"
        finally:
            os.kill(rank.pid, signal.SIGKILL)
            await end_of(rank)

    asyncio.run(body())


@pytest.mark.parametrize(
    "preparation", [{"preload": ("no.such.module",)}, {"warm": "tests.control.ranks:crash_at_start"}]
)
def test_spares_that_cannot_be_prepared_leave_the_ranks_alone(preparation: dict[str, object]) -> None:
    async def body() -> None:
        async with spared(**preparation) as (supervisor, launcher):  # type: ignore[arg-type]
            await until(supervisor, runs_with(supervisor, BOTH))
            await until(supervisor, lambda: any(line.evidence for line in lines(supervisor, "SPARE")))
            assert not ready(launcher)
            kill(supervisor, 1)
            await until(supervisor, runs_with(supervisor, (0,)))
            await until(supervisor, runs_with(supervisor, BOTH))

    asyncio.run(body())


def test_arguments_environment_and_stdin_reach_the_rank(tmp_path: Path) -> None:
    async def body() -> None:
        told = tmp_path / "told"
        async with spared(ranks.tells_what_it_was_given, {"path": str(told)}, spares=0, count=1) as (supervisor, _):
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
            assert told.read_text() == f"0 0 {supervisor.directory.path} /dev/null"
            assert "exit status 0" in supervisor.directory.events.read_text()
            assert not lines(supervisor, "COLD"), "no spares were asked for"

    asyncio.run(body())


def test_a_spare_is_warmed_for_the_rank_that_died_last() -> None:
    async def body() -> None:
        async with spared(warm=entry_name(ranks.notes_whom_it_is_for)) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            first = await a_spare(supervisor, launcher)
            directory = supervisor.directory.path
            assert (directory / f"for-{first}").read_text() == "0"
            kill(supervisor, 1)
            second = await a_spare(supervisor, launcher, (first,))
            assert (directory / f"for-{second}").read_text() == "1"

    asyncio.run(body())


def test_a_process_that_does_not_take_its_order_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made for a rank, because no spare was there: nothing else would end it."""

    async def body() -> None:
        launcher = SpareLauncher(entry_name(ranks.sleeps), refill=Refill(0), source=StartedSpares())
        made: list[int] = []

        def take(spare: Spare, order: bytes) -> Child:
            made.append(spare.child.pid)
            raise OSError("no buffer space available")

        monkeypatch.setattr(Spare, "take", take)
        with pytest.raises(OSError, match="no buffer space"):
            await launcher.start(0, 0, {})
        assert len(made) == 1
        assert not is_running(made[0])
        assert not Path(f"/proc/{made[0]}").exists(), "a zombie is left"
        await launcher.close()

    asyncio.run(body())


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(TypeError):
        SpareLauncher("a:b", {"not": object()}, refill=Refill(1), source=StartedSpares())

    async def body() -> None:
        launcher = SpareLauncher("a:b", {"much": "x" * MAX_ORDER}, refill=Refill(0), source=StartedSpares())
        with pytest.raises(OSError, match="is the most"):
            await launcher.start(0, 0, {})
        await launcher.close()
        with pytest.raises(OSError, match="closed"):
            await launcher.start(0, 0, {})

    asyncio.run(body())


ALONE = """
import asyncio, pathlib, sys
from eep.control.launch.refill import Refill
from eep.control.launch.spare import StartedSpares
from eep.control.launch.spare_launcher import SpareLauncher
async def main():
    at_once = Refill(1, settles_within=0.0)
    launcher = SpareLauncher("tests.control.ranks:sleeps", refill=at_once, source=StartedSpares(sys.argv[2:]))
    rank = await launcher.start(0, 0, {"EEP_TEST_SLEEPS": sys.argv[1]})
    # Until it has taken its order the rank, too, is one of those that end with the launcher.
    async with asyncio.timeout(120):
        while not pathlib.Path(sys.argv[1]).exists():
            await asyncio.sleep(0.01)
        while not launcher._pool or bool(sys.argv[2:]) == launcher._pool[0].is_ready:
            await asyncio.sleep(0.01)
    print(rank.pid, launcher._pool[0].child.pid, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("preload", [(), ("tests.control.launch.slow_import",)], ids=["ready", "importing"])
def test_spares_end_with_their_launcher_even_without_a_keeper(preload: tuple[str, ...], tmp_path: Path) -> None:
    """And ranks do not: their supervisor has a keeper for that."""

    async def body() -> None:
        program = subprocess.Popen(
            [sys.executable, "-c", ALONE, tmp_path / "sleeps", *preload],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert program.stdout is not None
        with program.stdout:
            rank, spare = map(int, (await asyncio.to_thread(program.stdout.readline)).split())
            program.kill()
            program.wait()
            try:
                await until_gone([spare])
                assert is_running(rank)
            finally:
                os.kill(rank, signal.SIGKILL)

    asyncio.run(body())
