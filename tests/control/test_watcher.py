"""Watchers hear who is in and who is gone; supervisors run in a thread; ranks are added beyond those at launch."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from eep.control.launch.processes import command_of
from eep.control.supervisor.background import BackgroundSupervisor
from eep.control.supervisor.settings import DirectorySettings, LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.control.watcher import Watcher
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskOperation
from eep.membership import Phase, RankStatus
from eep.view import View
from tests.control import ranks
from tests.control.harness import PATIENCE, ROOT, children_of, patient_policy


@contextmanager
def in_a_thread(
    count: int = 2, standby: tuple[int, ...] = (), program: FunctionType = ranks.steady, **options: Any
) -> Iterator[BackgroundSupervisor]:
    capacity = count + len(standby)
    background = BackgroundSupervisor(
        lambda: Supervisor(
            command_of(program),
            range(count),
            patient_policy(capacity),
            standby=standby,
            launch=LaunchSettings(environment={"PYTHONPATH": str(ROOT)}),
            store=StoreSettings(lease_ttl=60.0),
            **options,
        )
    )
    background.start()
    try:
        yield background
    finally:
        background.stop()
    assert not children_of(str(background.supervisor.directory.path))


class Heard:
    """What a watcher was told, in order."""

    def __init__(self, directory: Path) -> None:
        self._told: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.failed: list[tuple[int, int]] = []
        """The lives that exceptions ended."""
        self.watcher = Watcher(
            directory,
            lambda view, running: self._told.put(("run" if running else "agreed", view)),
            self._gone,
            lambda reason: self._told.put(("lost", reason)),
        )

    def _gone(self, rank: int, incarnation: int, reason: str, failed: bool) -> None:
        if failed:
            self.failed.append((rank, incarnation))
        self._told.put(("gone", (rank, incarnation)))

    def until(self, condition: Callable[[str, Any], bool]) -> list[tuple[str, Any]]:
        """Everything up to the first thing that fulfils ``condition``."""
        told: list[tuple[str, Any]] = []
        while not told or not condition(*told[-1]):
            told.append(self._told.get(timeout=PATIENCE))
        return told

    def until_runs(self, *active: int) -> list[tuple[str, Any]]:
        return self.until(lambda kind, what: kind == "run" and what.active == active)


def runs(active: tuple[int, ...]) -> Callable[[Supervisor], bool]:
    def condition(supervisor: Supervisor) -> bool:
        instance = supervisor.instance
        return instance is not None and instance.phase is Phase.RUN and instance.view.active == active

    return condition


def pid_of(background: BackgroundSupervisor, rank: int) -> int:
    return background.call(lambda supervisor: supervisor.pids[rank])


def test_a_watcher_hears_each_view_and_each_death_once() -> None:
    with in_a_thread() as background:
        heard = Heard(background.supervisor.directory.path)
        heard.until_runs(0, 1)
        os.kill(pid_of(background, 1), signal.SIGKILL)
        told = heard.until_runs(0, 1)
        heard.watcher.close()
    gone = [what for kind, what in told if kind == "gone"]
    assert gone == [(1, 0)]
    views = [(kind, what) for kind, what in told if kind != "gone"]
    assert told.index(("gone", (1, 0))) < told.index(views[0]), "the death is told before the view that follows from it"
    assert [(kind, view.active) for kind, view in views if view.epoch == views[0][1].epoch] == [
        ("agreed", (0,)),
        ("run", (0,)),
    ]
    epochs = [view.epoch for _, view in views]
    assert epochs == sorted(epochs)
    assert views[-1][1].incarnations == (0, 1)


def test_a_watcher_hears_which_life_an_exception_ended() -> None:
    with in_a_thread(program=ranks.fails) as background:
        heard = Heard(background.supervisor.directory.path)
        heard.until(lambda kind, what: kind == "run" and what.incarnations == (0, 1))
        assert heard.failed == [(1, 0)]
        os.kill(pid_of(background, 1), signal.SIGKILL)
        heard.until(lambda kind, what: kind == "run" and what.incarnations == (0, 2))
        heard.watcher.close()
    assert heard.failed == [(1, 0)], "a signal is no exception"


def test_a_watcher_that_comes_late_is_told_how_things_stand() -> None:
    with in_a_thread() as background:
        background.wait_until(runs((0, 1)), PATIENCE)
        heard = Heard(background.supervisor.directory.path)
        kind, view = heard.until(lambda kind, what: True)[0]
        assert kind == "run"
        assert isinstance(view, View)
        assert view.active == (0, 1)
        heard.watcher.close()


def test_a_watcher_finds_a_supervisor_that_comes_after_it_and_the_one_after_that(tmp_path: Path) -> None:
    directory = tmp_path / "control"
    heard = Heard(directory)
    heard.until(lambda kind, what: kind == "lost")
    for _ in range(2):
        with in_a_thread(1, directory=DirectorySettings(directory)):
            heard.until_runs(0)
        heard.until(lambda kind, what: kind == "lost")
    heard.watcher.close()
    assert not any(thread.name == "eep-watcher" for thread in threading.enumerate())


def test_ranks_are_added_beyond_those_at_launch_and_taken_out_again() -> None:
    with in_a_thread(2, standby=(2, 3)) as background:
        directory = background.supervisor.directory.path
        background.wait_until(runs((0, 1)), PATIENCE)
        assert ask_supervisor(directory, AskOperation("a", "launch", 3)).ok
        background.wait_until(runs((0, 1, 3)), PATIENCE)
        assert ask_supervisor(directory, AskOperation("b", "launch", 2)).ok
        background.wait_until(runs((0, 1, 2, 3)), PATIENCE)
        os.kill(pid_of(background, 3), signal.SIGKILL)
        background.wait_until(lambda supervisor: supervisor.state.ranks[3].incarnation == 1, PATIENCE)
        background.wait_until(runs((0, 1, 2, 3)), PATIENCE)
        assert ask_supervisor(directory, AskOperation("c", "remove", 3)).ok
        background.wait_until(runs((0, 1, 2)), PATIENCE)
        background.wait_until(lambda supervisor: supervisor.state.ranks[3].status is RankStatus.DOWN, PATIENCE)
        assert not ask_supervisor(directory, AskOperation("d", "launch", 4)).ok


def test_a_background_supervisor_that_cannot_start_says_why(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    background = BackgroundSupervisor(
        lambda: Supervisor(command_of(ranks.steady), [0], patient_policy(1), directory=DirectorySettings(tmp_path))
    )
    with pytest.raises(PermissionError, match="no other user can enter"):
        background.start()
    background.stop()
    with pytest.raises(RuntimeError, match="start"):
        _ = background.supervisor


def test_stopping_twice_does_nothing_twice() -> None:
    with in_a_thread(1) as background:
        background.wait_until(runs((0,)), PATIENCE)
        background.stop()
        background.stop()
