"""Rank processes: started by a launcher in a session of their own, watched with a pidfd, ended with SIGKILL.

The exit of a process is an event of the kernel: it is known in well under a millisecond, and never by
asking around. A launcher says how a process comes to be: :class:`SubprocessLauncher` starts a fresh
interpreter, :class:`eep.control.launch.fork_launcher.ForkLauncher` forks one that has imported everything, and
:class:`eep.control.launch.spare_launcher.SpareLauncher` takes one that was prepared in advance.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol

from eep.errors import EepError

Exit = Callable[[int, int, str, bool], None]
"""Called with rank, incarnation, evidence, and whether the process ended cleanly."""

RANK, INCARNATION = "EEP_RANK", "EEP_INCARNATION"
"""The environment variables that tell a process which rank it is."""


def require_pidfds() -> None:
    """EepError if this process may not watch and end others by pidfd."""
    try:
        pidfd = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(pidfd, 0)  # signal 0 only asks whether it could be sent
        finally:
            os.close(pidfd)
    except (OSError, AttributeError) as error:
        raise EepError(
            "this machine does not let a process watch others by pidfd, which is how EEP knows that a rank has ended "
            f"({error}); use Linux 5.3 or newer, and let the container's seccomp profile allow pidfd_open and "
            "pidfd_send_signal"
        ) from None


class Child(Protocol):
    """A process that was started, the leader of its own session. ``pidfd`` belongs to the holder of the child."""

    @property
    def pid(self) -> int: ...

    @property
    def pidfd(self) -> int: ...

    async def exit_code(self) -> int | None:
        """Once it has ended: its exit code, minus the signal that ended it, or None if it is unknown. Asked once."""


class Launcher(Protocol):
    async def start(self, rank: int, incarnation: int, environment: Mapping[str, str]) -> Child:
        """Start the process of a rank. ``environment`` is added to what it has anyway. OSError if it cannot be done."""

    async def close(self) -> None:
        """End what was started to start others. Processes that were started stay."""


class NoteWriter(Protocol):
    """Writes a line to the event log."""

    def __call__(self, phase: str, cause: str, rank: int = -1, incarnation: int = -1, evidence: str = "") -> None: ...


class ProcessHolder(Protocol):
    """Who sees to it that no process outlives this one, however this one ends."""

    def hold(self, pid: int) -> None:
        """A process was started."""

    def release(self, pid: int) -> None:
        """It has ended, and was not waited for yet."""


def command_of(function: FunctionType) -> list[str]:
    """The command that runs a Python function in a fresh interpreter. It is named, not shipped: nothing is pickled."""
    return [sys.executable, "-m", "eep.control.launch.entry_point", entry_name(function)]


def entry_name(function: FunctionType) -> str:
    """``module:function``, by which another process can find it."""
    name = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ValueError(f"{name} cannot be found from another process; move it to the top level of a module")
    return name


@dataclass(frozen=True)
class StartedProcess:
    """A child of this very process."""

    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        return self.process.pid

    async def exit_code(self) -> int | None:
        return self.process.wait()  # it has ended: this does not wait


class SubprocessLauncher:
    """Runs a command for each rank."""

    def __init__(self, command: Sequence[str]) -> None:
        if not command:
            raise ValueError("give the command of a rank: a program and its arguments")
        self._command = list(command)

    async def start(self, rank: int, incarnation: int, environment: Mapping[str, str]) -> Child:
        variables = {**os.environ, **environment}
        process = subprocess.Popen(self._command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
        return StartedProcess(process, os.pidfd_open(process.pid))

    async def close(self) -> None:
        pass


class _RankProcess:
    """One process of a rank, from the wish to have it until it has ended."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.child: Child | None = None
        self.has_begun = False
        self.is_unwanted = False
        """Since before its task had a first step."""
        self.fenced = False
        self.ended = False
        self.task: asyncio.Task[None] | None = None


class Processes:
    """The processes of one host, one per rank."""

    def __init__(
        self,
        launcher: Launcher,
        environment: Mapping[str, str],
        exited: Exit,
        may_start: Callable[[], Awaitable[None]] | None = None,
        holder: ProcessHolder | None = None,
    ) -> None:
        """``may_start`` returns when a process could do its work. It is waited for before each start."""
        self._launcher, self._may_start, self._holder = launcher, may_start, holder
        self._environment = dict(environment)
        self._exited = exited
        self._lives: dict[int, _RankProcess] = {}

    @property
    def pids(self) -> dict[int, int]:
        """The process id of every rank that runs."""
        return {rank: life.child.pid for rank, life in self._lives.items() if life.child is not None}

    @property
    def all_ended(self) -> bool:
        """Whether nothing runs and nothing is being started."""
        return not self._lives

    def launch(self, rank: int, incarnation: int) -> None:
        """Start a rank; how that goes is told by its exit or by what it says."""
        life = self._lives[rank] = _RankProcess(incarnation)
        life.task = asyncio.get_running_loop().create_task(self._live(rank, life))

    def fence(self, rank: int, incarnation: int) -> None:
        """SIGKILL to the rank and all it started. The exit is told like any other."""
        life = self._lives.get(rank)
        if life is None or life.incarnation != incarnation:
            return
        life.fenced = True
        if life.ended:
            return  # another process may have its number by now
        if life.child is not None:
            kill_all_of(life.child)
        elif life.task is not None and life.has_begun:
            life.task.cancel()
        else:  # a task that is cancelled now would never run, and its end would not be told
            life.is_unwanted = True

    async def close(self) -> None:
        await self._launcher.close()

    async def _live(self, rank: int, life: _RankProcess) -> None:
        life.has_begun = True
        if life.is_unwanted:
            self._over(rank, life, "ended before it was started", False)
            return
        marks = {**self._environment, RANK: str(rank), INCARNATION: str(life.incarnation)}
        try:
            if self._may_start is not None:
                await self._may_start()
            life.child = await self._launcher.start(rank, life.incarnation, marks)
        except asyncio.CancelledError:
            self._over(rank, life, "ended before it was started", False)
            return
        except OSError as error:
            self._over(rank, life, f"cannot be started: {error}", False)
            return
        if self._holder is not None:
            self._holder.hold(life.child.pid)
        if life.fenced:  # in the very moment in which it was started
            kill_all_of(life.child)
        await readable(life.child.pidfd)
        kill_all_of(life.child)  # what it started goes with it
        life.ended = True
        if self._holder is not None:
            self._holder.release(life.child.pid)
        os.close(life.child.pidfd)
        code = await life.child.exit_code()
        self._over(rank, life, describe_exit(code), code == 0)

    def _over(self, rank: int, life: _RankProcess, evidence: str, clean: bool) -> None:
        del self._lives[rank]
        self._exited(rank, life.incarnation, evidence, clean)


def kill_all_of(child: Child) -> None:
    """SIGKILL to a process and to its session's process group.

    Both, because a process that was forked a moment ago may not be in its own group yet. No other
    group gets the number while this one has a member, or while its leader has not been waited for.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


async def readable(descriptor: int) -> None:
    """Return when there is something to read; a pidfd has when its process has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def describe_exit(code: int | None) -> str:
    if code is None:
        return "exit status unknown"
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
