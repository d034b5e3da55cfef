"""Sessions: steps of several layers and a gather, while ranks are lost at random moments and at named points."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from eep import cli
from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import entry_name
from eep.control.supervisor.background import BackgroundSupervisor
from eep.control.supervisor.settings import DirectorySettings, LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.drill.faults import Target
from eep.faults import orders
from eep.observe.event_log import read_events
from eep.view import View
from tests import failpoints
from tests.control.harness import (
    PATIENCE,
    ROOT,
    children_of,
    is_running,
    patient_policy,
    record,
    runs_with,
    supervised,
    until,
)
from tests.control.test_data_plane import check_journals, journal, until_committed
from tests.experts import model
from tests.recovery import covered_rank, differing_rank, lacking_rank, session_rank

ALL = (0, 1, 2, 3)


def test_no_rank_runs_while_one_lacks_experts() -> None:
    """That rank tells the others, and all wait for the joiner; the supervisor condemns none of them."""

    async def body() -> None:
        async with supervised(lacking_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            first = record(supervisor).view
            for rank in ALL:
                await until_committed(supervisor, rank, first.epoch)
            os.kill(supervisor.pids[3], signal.SIGKILL)
            await until(supervisor, lambda: record(supervisor).view.epoch >= first.epoch + 2)
            await until(supervisor, runs_with(supervisor, ALL))
            again = record(supervisor).view
            assert again.incarnations == (0, 0, 0, 1)
            for rank in ALL:
                await until_committed(supervisor, rank, again.epoch, again.incarnations[rank])
            lines = [line for rank in (0, 1, 2) for line in journal(supervisor, rank)]
            assert not [line for line in lines if line["epoch"] == first.epoch + 1]
            check_journals(supervisor)

    asyncio.run(body())


def test_of_ranks_that_place_experts_differently_only_the_fewer_end() -> None:
    async def body() -> None:
        async with supervised(differing_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            for rank in ALL:
                await until_committed(supervisor, rank, record(supervisor).view.epoch)
            os.kill(supervisor.pids[3], signal.SIGKILL)
            await until(supervisor, lambda: record(supervisor).view.incarnations[2:] == (1, 1))
            after = await until_all_commit(supervisor)
            assert after.incarnations == (0, 0, 1, 1)
            check_journals(supervisor)

    asyncio.run(body())


@pytest.mark.parametrize("program", [session_rank.main, session_rank.overlapping])
def test_kills_at_random_moments_up_to_three_at_once(program: Callable[[], None]) -> None:
    seed = 20261115
    choose = random.Random(seed)

    async def body() -> None:
        async with supervised(program, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            for number in range(24):
                if number >= 8 and any(line["repeated"] for line in all_lines(supervisor)):
                    break
                if choose.random() < 0.6:  # else while those killed before are still coming back
                    await until(supervisor, runs_with(supervisor, ALL))
                await asyncio.sleep(choose.uniform(0.0, 0.5))
                for rank in choose.sample(ALL, choose.choice((1, 1, 1, 2, 3))):
                    if (pid := supervisor.pids.get(rank)) is not None:
                        with contextlib.suppress(ProcessLookupError):  # it was killed already and is yet to be reaped
                            os.kill(pid, signal.SIGKILL)
            await until_all_commit(supervisor)
            check_journals(supervisor)
            lines = all_lines(supervisor)
            assert any(line["repeated"] for line in lines), f"no step was ever run again: seed {seed} tests nothing"

    asyncio.run(body())


@pytest.mark.parametrize("program", [session_rank.settling, session_rank.in_portions])
def test_a_rank_that_judges_its_last_step_before_the_next_keeps_in_step_with_the_others(
    program: Callable[[], None],
) -> None:
    """It has agreed to the next step and not begun it when the view changes. The others have, or do so without it later."""
    choose = random.Random(20261117)
    killed = dict.fromkeys(ALL, 0)

    async def body() -> None:
        async with supervised(program, forked=True) as supervisor:
            for _ in range(12):
                await until_all_commit(supervisor)
                await asyncio.sleep(choose.uniform(0.0, 0.2))
                before = record(supervisor).view.epoch
                rank = choose.choice(ALL)
                killed[rank] += 1
                os.kill(supervisor.pids[rank], signal.SIGKILL)
                await until(supervisor, lambda: record(supervisor).view.epoch > before)  # noqa: B023  (it ends here)
            view = await until_all_commit(supervisor)
            assert view.incarnations == tuple(killed.values()), "ranks that were not killed were lost as well"
            check_journals(supervisor)

    asyncio.run(body())


def all_lines(supervisor: Supervisor) -> list[dict[str, Any]]:
    incarnations = record(supervisor).view.incarnations
    lives = [(rank, life) for rank in ALL for life in range(incarnations[rank] + 1)]
    return [line for rank, life in lives for line in journal(supervisor, rank, life)]


async def until_all_commit(supervisor: Supervisor) -> View:
    """Until all ranks live, run and have committed a step in the newest view. (The record may still hold one just killed.)"""
    async with asyncio.timeout(PATIENCE):
        while True:
            await until(supervisor, runs_with(supervisor, ALL))
            view = record(supervisor).view
            alive = all(is_running(pid) for pid in supervisor.pids.values())
            if alive and all(has_committed(supervisor, rank, view) for rank in ALL):
                return view
            await asyncio.sleep(0.02)


def has_committed(supervisor: Supervisor, rank: int, view: View) -> bool:
    lines = journal(supervisor, rank, view.incarnations[rank])
    return bool(lines) and lines[-1]["epoch"] >= view.epoch


# ---- the matrix of roles and fault points ----


class Drilled:
    """A supervisor in the background whose ranks keep experts covered and obey orders for faults."""

    def __init__(self, place: Path, program: Callable[[], None] = covered_rank.main) -> None:
        checkpoint = model.save_checkpoint(place / "model")
        environment = {"PYTHONPATH": str(ROOT), covered_rank.CHECKPOINT: str(checkpoint)}
        patience = {"longest_backoff": 0.05, "settle_deadline": 20.0}

        def make() -> Supervisor:
            return Supervisor(
                ForkLauncher(entry_name(program), preload=["tests.recovery.covered_rank"]),
                ALL,
                patient_policy(len(ALL), **patience),
                launch=LaunchSettings(environment),
                directory=DirectorySettings(place / "d", remove=True),
                store=StoreSettings(lease_ttl=60.0),
            )

        (place / "d").mkdir(mode=0o700)
        orders.allow_in(place / "d")
        self._background = BackgroundSupervisor(make)
        self.target = Target(place / "d")

    def __enter__(self) -> Drilled:
        self._background.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._background.stop()

    @property
    def supervisor(self) -> Supervisor:
        return self._background.supervisor

    def until_all_commit(self, after: Mapping[int, int]) -> View:
        """Until all ranks run, those of ``after`` in a later incarnation, and each has committed a step there."""

        def is_so(supervisor: Supervisor) -> bool:
            if not runs_with(supervisor, ALL)():
                return False
            lives = record(supervisor).view.incarnations
            return all(lives[rank] > life for rank, life in after.items())

        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._background.wait_until(is_so, PATIENCE)
            view = self._background.call(record).view
            if all(has_committed(self.supervisor, rank, view) for rank in ALL):
                return view
            time.sleep(0.01)
        raise TimeoutError(f"not all ranks have committed a step within {PATIENCE:.0f} s")

    def lines(self) -> list[dict[str, Any]]:
        """What all lives of all ranks have committed."""
        return self._background.call(all_lines)

    def wait_for_epoch(self, epoch: int) -> None:
        self._background.wait_until(lambda supervisor: record(supervisor).view.epoch >= epoch, PATIENCE)


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("points")
    with Drilled(place) as instance:
        instance.until_all_commit({})
        yield instance
    assert children_of(str(place / "d")) == []
    assert not (place / "d").exists()


@pytest.mark.parametrize(
    ("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)], ids=["rank 0 killed", "rank 2 stopped"]
)
def test_steps_stay_exact_while_a_rank_is_lost_and_replaced(
    drilled: Drilled, number: signal.Signals, victim: int
) -> None:
    before = drilled.until_all_commit({}).incarnations
    pid = drilled.supervisor.pids[victim]
    os.kill(pid, number)
    drilled.until_all_commit({victim: before[victim]})
    assert not is_running(pid)
    check_journals(drilled.supervisor)


CASES = failpoints.matrix()
ALL_CASES = CASES + failpoints.stops([case for case in CASES if case.role in ("survivor", "joiner")])


SAMPLE = failpoints.every_point_once(CASES, kernels=3)


@pytest.mark.parametrize("case", ALL_CASES if failpoints.EVERYTHING else SAMPLE, ids=str)
def test_a_fault_at_a_named_point_of_a_recovery(drilled: Drilled, case: failpoints.Case) -> None:
    before = drilled.until_all_commit({}).incarnations
    fired = len(drilled.target.fired())
    drilled.target.arm(case.armed, case.point, case.action, sleep_ms=300)
    if case.role == "joiner":
        os.kill(drilled.supervisor.pids[case.victim], signal.SIGKILL)
    else:
        drilled.target.arm(case.victim, failpoints.FIRST_LOSS, "kill")
        assert drilled.target.wait_until_fired(case.victim, failpoints.FIRST_LOSS, PATIENCE)
    assert drilled.target.wait_until_fired(case.armed, case.point, PATIENCE), f"never passed: {case.point}"
    lost = {case.victim: before[case.victim]}
    if case.armed is not None:
        # A joiner has died twice: when it was lost first, and on its way back in.
        lost[case.armed] = before[case.armed] + (case.role == "joiner")
    drilled.until_all_commit(lost)
    acted = [(line.rank, line.operation) for line in drilled.target.fired()[fired:]]
    assert acted.count((case.armed, case.point)) == 1
    assert drilled.target.armed() == []
    check_journals(drilled.supervisor)


def test_a_rank_that_stands_still_between_two_steps_is_replaced(drilled: Drilled) -> None:
    """No rank waits for it within a step: the others notice when they are about to begin the next one."""
    before = drilled.until_all_commit({}).incarnations
    drilled.target.arm(2, "step.trusted", "stop")
    assert drilled.target.wait_until_fired(2, "step.trusted", PATIENCE)
    drilled.until_all_commit({2: before[2]})
    check_journals(drilled.supervisor)


def test_a_lost_message_costs_one_rank_its_place_and_no_result(drilled: Drilled) -> None:
    before = drilled.until_all_commit({})
    drilled.target.drop(2, count=1)
    assert drilled.target.wait_until_fired(2, "dispatch.after_rows", PATIENCE)
    drilled.wait_for_epoch(before.epoch + 1)
    after = drilled.until_all_commit({})
    assert after.incarnations != before.incarnations, "the supervisor replaced the rank that kept the others waiting"
    lines = read_events(drilled.supervisor.directory.events)
    assert any(line.phase == "SUSPECTED" and line.epoch == before.epoch for line in lines)
    check_journals(drilled.supervisor)


def test_points_are_armed_from_the_command_line(drilled: Drilled, capsys: pytest.CaptureFixture[str]) -> None:
    def eep(*arguments: str) -> tuple[int, str]:
        code = cli.main(["fault", *arguments, "--dir", str(drilled.target.directory)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    assert eep("arm", "--rank", "9", "--point", "join.ready") == (1, "eep: this server has ranks [0, 1, 2, 3], not 9\n")
    assert eep("arm", "--rank", "1") == (1, "eep: eep fault arm needs --point; docs/reference.md lists the points\n")
    assert eep("drop")[0] == 1
    code, said = eep("arm", "--rank", "1", "--point", "join.ready", "--action", "kill", "--skip", "5")
    assert (code, said) == (0, "arm: rank 1 is to kill at join.ready\n")
    assert eep("arm", "--point", "supervisor.before_launch", "--action", "sleep")[0] == 0
    assert drilled.target.armed() == [("rank-1", "join.ready"), ("supervisor", "supervisor.before_launch")]
    assert eep("disarm") == (0, "disarm: 2 points had not acted\n")
    assert drilled.target.armed() == []
