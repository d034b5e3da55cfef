"""A real supervisor, real rank processes, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from pathlib import Path

import pytest

from eep.control.launch.processes import command_of
from eep.control.private_directory import PrivateDirectory
from eep.control.store.embedded_store import EmbeddedStore
from eep.control.store.key_value import KeyValue
from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskOperation, AskStatus
from eep.membership import Effect, Fence, Launch, RankStatus
from eep.observe.event_log import read_events
from tests.control import ranks
from tests.control.harness import (
    kill,
    patient_policy,
    record,
    runs_with,
    supervised,
    until,
    until_gone,
)

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_out_and_comes_back_as_another(victim: int) -> None:
    async def body() -> None:
        async with supervised(ranks.steady) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            survivors = tuple(rank for rank in ALL if rank != victim)
            kill(supervisor, victim)
            await until(supervisor, runs_with(supervisor, survivors))
            assert record(supervisor).view.incarnations == (0, 0, 0, 0)
            await until(supervisor, runs_with(supervisor, ALL))
            assert record(supervisor).view.incarnations[victim] == 1

    asyncio.run(body())


def test_down_to_the_last_rank() -> None:
    async def body() -> None:
        policy = patient_policy(4, relaunch_limit=0)
        async with supervised(ranks.steady, policy=policy) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            for rank in (0, 1, 2):
                kill(supervisor, rank)
            await until(supervisor, runs_with(supervisor, (3,)))
            # They are out as soon as they run no more; that the kernel has cleared up after them is known a little later.
            for rank in (0, 1, 2):
                await until(supervisor, lambda rank=rank: supervisor.state.ranks[rank].status is RankStatus.DOWN)

    asyncio.run(body())


def test_a_stopped_rank_is_fenced_before_it_is_replaced() -> None:
    async def body() -> None:
        async with supervised(ranks.suspects_a_stopped_peer) as supervisor:
            seen: list[Effect] = []
            supervisor.watch_effects(seen.append)
            await until(supervisor, runs_with(supervisor, ALL))
            hung = supervisor.pids[2]
            os.kill(hung, signal.SIGSTOP)
            (supervisor.directory.path / "pid-2").write_text(str(hung))
            await until(supervisor, runs_with(supervisor, (0, 1, 3)))
            await until(supervisor, runs_with(supervisor, ALL))
            await until_gone([hung])
            mine = [effect for effect in seen if isinstance(effect, Fence | Launch) and effect.rank == 2]
            fence, launch = mine[-2:]
            assert isinstance(fence, Fence)
            assert "kept rank" in fence.reason
            assert isinstance(launch, Launch)
            assert launch.incarnation == 1
            assert record(supervisor).view.incarnations == (0, 0, 1, 0), "a bystander was replaced"

    asyncio.run(body())


def test_a_second_kill_during_repair() -> None:
    async def body() -> None:
        async with supervised(ranks.slow_repair) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            gate = supervisor.directory.path / "closed"
            gate.touch()
            epoch = supervisor.state.epoch
            kill(supervisor, 1)
            await until(supervisor, lambda: supervisor.state.epoch == epoch + 1)
            kill(supervisor, 2)
            await until(supervisor, lambda: supervisor.state.epoch == epoch + 2)
            assert record(supervisor).view.active == (0, 3)
            gate.unlink()
            await until(supervisor, runs_with(supervisor, ALL))

    asyncio.run(body())


def test_a_rank_that_crashes_at_start_is_given_up_and_the_others_run() -> None:
    async def body() -> None:
        policy = patient_policy(1, relaunch_limit=2)
        async with supervised(ranks.crash_at_start, 1, policy=policy) as supervisor:
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
            assert supervisor.state.ranks[0].failures == 3
            assert "exit status 3" in supervisor.directory.events.read_text()

    asyncio.run(body())


def test_a_rank_that_is_never_ready_is_fenced() -> None:
    async def body() -> None:
        policy = patient_policy(1, start_deadline=0.5, relaunch_limit=0)
        async with supervised(ranks.never_ready, 1, policy=policy) as supervisor:
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)

    asyncio.run(body())


def test_a_program_that_does_not_exist_is_a_failure_like_any_other(tmp_path: Path) -> None:
    async def body() -> None:
        supervisor = Supervisor(["/nonexistent/program"], [0], patient_policy(1, relaunch_limit=0))
        await supervisor.start()
        await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
        assert "cannot be started" in supervisor.directory.events.read_text()
        await supervisor.stop()

    asyncio.run(body())


def test_a_rank_that_leaves_or_finishes_is_not_relaunched() -> None:
    async def body() -> None:
        async with supervised(ranks.leaves) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 2, 3)))
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.DOWN)
            assert record(supervisor).granted[1] == 0
        async with supervised(ranks.finishes, 1) as supervisor:
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
            assert supervisor.state.ranks[0].incarnation == 0

    asyncio.run(body())


def test_an_operator_removes_and_brings_back(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with supervised(ranks.steady) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            path = supervisor.directory.path
            for operation in ("op-1", "op-1"):  # asking again after a lost answer does nothing twice
                answer = await asyncio.to_thread(ask_supervisor, path, AskOperation(operation, "remove", 1))
                assert answer.ok
            await until(supervisor, runs_with(supervisor, (0, 2, 3)))
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.DOWN)
            answer = await asyncio.to_thread(ask_supervisor, path, AskOperation("op-2", "remove", 99))
            assert not answer.ok
            assert "rank 99 is not of this host" in answer.body
            await asyncio.to_thread(ask_supervisor, path, AskOperation("op-3", "launch", 1))
            await until(supervisor, runs_with(supervisor, ALL))
            status = json.loads((await asyncio.to_thread(ask_supervisor, path, AskStatus())).body)
            assert status["phase"] == "RUN"
            assert status["ranks"]["1"]["incarnation"] == 1
            assert status["rejected"] == {"unknown-rank": 1}

    asyncio.run(body())


def test_the_directory_is_private(tmp_path: Path) -> None:
    async def body() -> None:
        async with supervised(ranks.steady, 1) as supervisor:
            assert stat.S_IMODE(supervisor.directory.path.stat().st_mode) == 0o700
            assert stat.S_IMODE(supervisor.directory.socket.stat().st_mode) == 0o600
            assert stat.S_IMODE((supervisor.directory.path / "key").stat().st_mode) == 0o600
        assert not supervisor.directory.path.exists(), "something was left behind"

    asyncio.run(body())
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="no other user can enter"):
        PrivateDirectory(tmp_path)
    with pytest.raises(ValueError, match="too long"):
        PrivateDirectory.create(tmp_path / ("x" * 100))


def test_two_supervisors_with_the_same_ranks() -> None:
    async def body() -> None:
        store = EmbeddedStore()
        async with supervised(ranks.steady, 2, host="a", store=store) as one:
            await until(one, runs_with(one, (0, 1)))
            before = record(one)
            async with supervised(ranks.steady, 2, host="b", store=store) as other:
                await until(other, lambda: other.journal.rejected["rank-claimed"] > 0)
                assert not other.pids
                async with supervised(ranks.steady, 2, host="a", store=store) as twin:
                    await until(twin, lambda: twin.journal.rejected["host-claimed"] > 0)
                    assert not twin.pids
            assert record(one).view == before.view

    asyncio.run(body())


def test_events_tell_the_story() -> None:
    async def body() -> None:
        async with supervised(ranks.steady) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            kill(supervisor, 1)
            await until(supervisor, runs_with(supervisor, (0, 2, 3)))
            await until(supervisor, lambda: supervisor.state.ranks[1].incarnation == 1)  # so its exit has been seen
            lines = list(read_events(supervisor.directory.events))
            exited = next(line for line in lines if line.phase == "EXITED")
            assert (exited.rank, exited.incarnation, exited.evidence) == (1, 0, "SIGKILL")
            change = [line for line in lines if line.operation == "view-2"]
            assert [line.phase for line in change] == ["REVOKED", "AGREED", "REPAIRED", "RUN"]
            assert [line.epoch for line in change] == [1, 2, 2, 2]
            assert "rank 1 (incarnation 0) is dead" in change[1].cause
            assert all(line.duration is not None for line in change)
            assert [line.time for line in lines] == sorted(line.time for line in lines)

    asyncio.run(body())


def test_callables_that_cannot_be_found_are_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        command_of(lambda: None)  # type: ignore[arg-type]


def test_a_store_that_forgets_is_noticed_and_nothing_changes() -> None:
    async def body() -> None:
        store = EmbeddedStore()
        async with supervised(ranks.steady, 3, store=store) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1, 2)))
            before = record(supervisor)
            store._contents = KeyValue()
            kill(supervisor, 1)
            await until(supervisor, lambda: supervisor.journal.rejected["store-forgot"] > 0)
            assert record(supervisor) == before
            assert "was committed" in supervisor.directory.events.read_text()
            assert await store.get("instance") is None

    asyncio.run(body())


def test_a_supervisor_that_fails_inside_holds_its_ranks_and_says_so() -> None:
    class Broken(EmbeddedStore):
        async def keep_alive(self, lease: int) -> bool:
            raise ZeroDivisionError("a bug")

    async def body() -> None:
        async with supervised(ranks.steady, 2, store=Broken(), lease_ttl=20.0) as supervisor:
            await until(supervisor, lambda: supervisor.journal.rejected["internal"] > 0)
            assert not supervisor.state.leased
            assert "must be restarted" in supervisor.journal.last_rejection

    asyncio.run(body())
