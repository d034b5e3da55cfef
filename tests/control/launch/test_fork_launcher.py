"""Ranks that are forked from a process that has imported everything: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import entry_name
from eep.control.supervisor.settings import LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import RankStatus
from eep.observe.event_log import read_events
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
from tests.control.launch import forking_program

ALL = (0, 1, 2)


@asynccontextmanager
async def forked(
    program: object, count: int = 3, arguments: dict[str, object] | None = None, **policy: object
) -> AsyncIterator[tuple[Supervisor, ForkLauncher]]:
    launcher = ForkLauncher(entry_name(program), arguments, preload=["tests.control.ranks"])  # type: ignore[arg-type]
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


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_rank_does_not_collect_what_was_imported_before_it_was_forked(tmp_path: Path) -> None:
    """To visit an object writes to its page, which is then copied: that took a rank longer than all else it did to start."""

    async def body() -> None:
        told = tmp_path / "told"
        async with forked(ranks.tells_what_collections_leave_out, 1, {"path": str(told)}) as (supervisor, _):
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
            assert int(told.read_text()) > 1000

    asyncio.run(body())


def test_a_forked_rank_is_seen_to_die_and_comes_back() -> None:
    async def body() -> None:
        async with forked(ranks.steady) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, ALL))
            assert {parent_of(pid) for pid in supervisor.pids.values()} == {launcher.server_pid}
            assert all(os.getsid(pid) == pid for pid in supervisor.pids.values())
            killed = supervisor.pids[1]
            kill(supervisor, 1)
            await until(supervisor, runs_with(supervisor, (0, 2)))
            await until(supervisor, runs_with(supervisor, ALL))
            assert record(supervisor).view.incarnations == (0, 1, 0)
            assert "SIGKILL" in supervisor.directory.events.read_text(), "the exit code got lost"
            assert not Path(f"/proc/{killed}").exists(), "a zombie is left"

    asyncio.run(body())


def test_ranks_outlive_their_fork_server_and_the_next_one_replaces_them() -> None:
    async def body() -> None:
        async with forked(ranks.steady) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, ALL))
            await until_copied(launcher)
            first, copy, before = launcher.server_pid, launcher.copy_pid, record(supervisor)
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until_replaced(launcher, first)
            assert launcher.server_pid == copy, "the next one had to import everything again"
            assert record(supervisor) == before, "the death of the fork server was felt"
            assert all(is_running(pid) for pid in supervisor.pids.values())
            kill(supervisor, 2)
            await until(supervisor, runs_with(supervisor, (0, 1)))
            await until(supervisor, runs_with(supervisor, ALL))
            assert parent_of(supervisor.pids[2]) == launcher.server_pid
            told = [event for event in read_events(supervisor.directory.events) if event.phase == "FORK-SERVER"]
            ended, ready = (event.cause for event in told)
            assert f"process {first}" in ended
            assert f"process {copy}" in ended
            assert f"process {copy} is ready" in ready
            assert "exit status unknown" in supervisor.directory.events.read_text()

    asyncio.run(body())


def test_a_copy_that_ends_is_replaced_and_one_that_takes_over_has_a_copy_too() -> None:
    async def body() -> None:
        async with forked(ranks.steady) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, ALL))
            await until_copied(launcher)
            copy = launcher.copy_pid
            assert copy is not None
            os.kill(copy, signal.SIGKILL)
            await until_copied(launcher, other_than=copy)
            assert not Path(f"/proc/{copy}").exists(), "a zombie is left"
            for _ in range(2):
                server, copy = launcher.server_pid, launcher.copy_pid
                assert server is not None
                os.kill(server, signal.SIGKILL)
                await until_replaced(launcher, server)
                assert launcher.server_pid == copy
                await until_copied(launcher)
            kill(supervisor, 0)
            await until(supervisor, runs_with(supervisor, (1, 2)))
            await until(supervisor, runs_with(supervisor, ALL))

    asyncio.run(body())


def test_when_a_fork_server_ends_with_its_copy_the_next_imports_everything_and_lost_ranks_wait() -> None:
    async def body() -> None:
        async with forked(ranks.steady) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, ALL))
            await until_copied(launcher)
            ended = (launcher.server_pid, launcher.copy_pid)
            for pid in (supervisor.pids[1], *ended):
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            await until(supervisor, runs_with(supervisor, (0, 2)))
            await until(supervisor, runs_with(supervisor, ALL))
            assert launcher.server_pid not in ended
            assert parent_of(supervisor.pids[1]) == launcher.server_pid

    asyncio.run(body())


async def until_copied(launcher: ForkLauncher, other_than: int | None = None) -> None:
    async with asyncio.timeout(PATIENCE):
        while launcher.copy_pid in (None, other_than):
            await asyncio.sleep(0.01)


async def until_replaced(launcher: ForkLauncher, server: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while launcher.server_pid in (None, server):
            await asyncio.sleep(0.01)


def test_a_rank_that_signals_its_parent_hurts_no_other() -> None:
    async def body() -> None:
        async with forked(ranks.signals_its_parent, relaunch_limit=0) as (supervisor, launcher):
            await until(supervisor, runs_with(supervisor, (0, 2)))
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.DOWN)
            server = launcher.server_pid
            assert server is not None
            assert is_running(server)

    asyncio.run(body())


def test_arguments_environment_and_stdin_reach_the_rank(tmp_path: Path) -> None:
    async def body() -> None:
        told = str(tmp_path / "told")
        async with forked(ranks.tells_what_it_was_given, 1, {"path": told}) as (supervisor, _):
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
            assert Path(told).read_text() == f"0 0 {supervisor.directory.path} /dev/null"
            assert supervisor.state.ranks[0].failures == 1
            assert "exit status 0" in supervisor.directory.events.read_text()

    asyncio.run(body())
    with pytest.raises(TypeError):
        ForkLauncher("a:b", {"not": object()})


def test_a_program_that_cannot_be_found_fails_as_a_rank() -> None:
    async def body() -> None:
        launcher = ForkLauncher("tests.control.ranks:no_such_function", preload=["no.such.module"])
        supervisor = Supervisor(
            launcher,
            [0],
            patient_policy(1, relaunch_limit=0),
            launch=LaunchSettings(environment={"PYTHONPATH": str(ROOT)}),
        )
        await supervisor.start()
        await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
        assert "exit status 1" in supervisor.directory.events.read_text()
        await supervisor.stop()

    asyncio.run(body())


def test_stopping_while_the_fork_server_is_still_importing() -> None:
    async def body() -> None:
        launcher = ForkLauncher(entry_name(ranks.steady), preload=["tests.control.launch.slow_import"])
        supervisor = Supervisor(launcher, range(2), patient_policy(2), launch=LaunchSettings({"PYTHONPATH": str(ROOT)}))
        await supervisor.start()
        await until(supervisor, lambda: launcher.server_pid is not None)
        server = launcher.server_pid
        assert server is not None
        await supervisor.stop()
        await until_gone([server])
        assert not supervisor.pids

    asyncio.run(body())


class Host:
    """A process that runs :mod:`tests.control.launch.forking_program`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def running(self) -> tuple[int, list[int]]:
        """The process ids of the fork server and of the ranks."""
        word, server, *pids = self.says()
        assert word == "running"
        return int(server), [int(pid) for pid in pids]

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextmanager
def forking_host() -> Iterator[Host]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.control.launch.forking_program"],
        env={**os.environ, "PYTHONPATH": str(ROOT), forking_program.MARK: uuid4().hex},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    ) as process:
        try:
            yield Host(process)
        finally:
            process.kill()


def test_a_process_can_bring_its_own_fork_server() -> None:
    with forking_host() as host:
        first, pids = host.running()
        assert parent_of(first) == host.process.pid
        assert {parent_of(pid) for pid in pids} == {first}
        assert all(os.getsid(pid) == pid for pid in pids)
        host.tell("kill 1")
        server, after = host.running()
        assert (server, after[0]) == (first, pids[0])
        assert parent_of(after[1]) == first
        host.tell("kill server")
        second, still = host.running()
        assert still == after, "ranks outlive it"
        host.tell("kill 0")
        server, last = host.running()
        assert (server, last[1]) == (second, after[1])
        assert parent_of(last[0]) == second
        host.tell("stop")
        assert host.says() == ["stopped"], "the keeper spares those who carry the mark in the supervisor's own session"
        assert host.process.wait(PATIENCE) == 0
        asyncio.run(until_gone([second, *last]))


def test_ranks_without_the_directory_in_their_environment_end_with_a_host_that_is_killed() -> None:
    with forking_host() as host:
        server, pids = host.running()
        environment = Path(f"/proc/{pids[0]}/environ").read_bytes()
        assert b"EEP_CONTROL_DIR" not in environment, "they are found by it, and this test shows nothing"
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that they cannot end by themselves
        host.process.kill()
        asyncio.run(until_gone([server, *pids]))
