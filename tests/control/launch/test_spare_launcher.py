"""Ranks that take a process which was prepared in advance: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from eep.control.launch import spare_launcher
from eep.control.launch.processes import RANK, Child, entry_name, readable
from eep.control.launch.refill import Refill
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.launch.spare_process import MAX_ORDER
from eep.control.supervisor.settings import LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import RankStatus
from eep.observe.event_log import EventLine, read_events
from tests.control import ranks
from tests.control.harness import (
    PATIENCE,
    ROOT,
    children_of,
    is_running,
    kill,
    patient_policy,
    record,
    runs_with,
    until,
    until_gone,
)

BOTH = (0, 1)


@asynccontextmanager
async def spared(
    program: Callable[..., object] = ranks.steady,
    arguments: dict[str, object] | None = None,
    *,
    spares: int = 1,
    preload: tuple[str, ...] = ("tests.control.ranks",),
    warm: str = "",
    free_cores: int = 0,
    count: int = 2,
    **policy: object,
) -> AsyncIterator[tuple[Supervisor, SpareLauncher]]:
    refill = Refill(spares, free_cores=free_cores)
    launcher = SpareLauncher(entry_name(program), arguments, refill=refill, preload=preload, warm=warm)
    supervisor = Supervisor(
        launcher,
        range(count),
        patient_policy(count, **policy),
        launch=LaunchSettings(environment={"PYTHONPATH": str(ROOT)}),
        store=StoreSettings(lease_ttl=60.0),
    )
    await supervisor.start()
    try:
        yield supervisor, launcher
    finally:
        await supervisor.stop()
    assert not children_of(str(supervisor.directory.path)), "something was left behind"
    assert not supervisor.directory.path.exists()


def ready(launcher: SpareLauncher) -> list[int]:
    pids = launcher.status()["pids"]
    assert isinstance(pids, list)
    return pids


def lines(supervisor: Supervisor, phase: str) -> list[EventLine]:
    return [line for line in read_events(supervisor.directory.events) if line.phase == phase]


async def a_spare(supervisor: Supervisor, launcher: SpareLauncher, not_one_of: tuple[int, ...] = ()) -> int:
    """The process id of a spare that is ready."""
    await until(supervisor, lambda: any(pid not in not_one_of for pid in ready(launcher)))
    return next(pid for pid in ready(launcher) if pid not in not_one_of)


def test_a_killed_rank_comes_back_as_the_spare_and_the_pool_refills() -> None:
    async def body() -> None:
        async with spared() as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, BOTH))
            assert len(lines(supervisor, "COLD")) == 2, "there was nothing to take at the start"
            spare = await a_spare(supervisor, launcher)
            assert os.getsid(spare) == spare
            assert spare in children_of(str(supervisor.directory.path)), "a keeper would not find it"
            assert f'"spares":{{"wanted":1,"ready":1,"preparing":0,"pids":[{spare}]}}' in supervisor.status()
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


def test_a_spare_that_dies_is_replaced_and_harms_no_rank() -> None:
    async def body() -> None:
        async with spared(spares=2) as (supervisor, launcher):
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


async def end_of(child: Child) -> int | None:
    async with asyncio.timeout(PATIENCE):
        await readable(child.pidfd)
    os.close(child.pidfd)
    return await child.exit_code()


def test_an_order_reaches_a_spare_that_has_just_become_ready(tmp_path: Path) -> None:
    """It has said that it is ready, and is taken before the launcher has read that."""

    async def body() -> None:
        at_once = Refill(1, settles_within=0.0)
        launcher = SpareLauncher(entry_name(ranks.leaves_a_mark), {"directory": str(tmp_path)}, refill=at_once)
        first = await launcher.start(0, 0, {RANK: "0"})
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
            entry_name(ranks.sleeps), refill=at_once, preload=("tests.control.launch.slow_import",)
        )
        told: list[str] = []
        launcher.follow(lambda _: None, lambda phase, *_, **__: told.append(phase))
        rank = await launcher.start(0, 0, {})
        spares = [spare.child.pid for spare in launcher._pool]
        assert len(spares) == 2
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
        launcher = SpareLauncher(entry_name(ranks.sleeps), refill=Refill(0))
        made: list[int] = []

        def take(spare: spare_launcher._Spare, order: bytes) -> Child:
            made.append(spare.child.pid)
            raise OSError("no buffer space available")

        monkeypatch.setattr(spare_launcher._Spare, "take", take)
        with pytest.raises(OSError, match="no buffer space"):
            await launcher.start(0, 0, {})
        assert len(made) == 1
        assert not is_running(made[0])
        assert not Path(f"/proc/{made[0]}").exists(), "a zombie is left"
        await launcher.close()

    asyncio.run(body())


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(TypeError):
        SpareLauncher("a:b", {"not": object()}, refill=Refill(1))

    async def body() -> None:
        launcher = SpareLauncher("a:b", {"much": "x" * MAX_ORDER}, refill=Refill(0))
        with pytest.raises(OSError, match="is the most"):
            await launcher.start(0, 0, {})
        await launcher.close()
        with pytest.raises(OSError, match="closed"):
            await launcher.start(0, 0, {})

    asyncio.run(body())


ALONE = """
import asyncio, pathlib, sys
from eep.control.launch.refill import Refill
from eep.control.launch.spare_launcher import SpareLauncher
async def main():
    at_once = Refill(1, settles_within=0.0)
    launcher = SpareLauncher("tests.control.ranks:sleeps", refill=at_once, preload=sys.argv[2:])
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
