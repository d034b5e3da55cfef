"""A supervisor's side of its keeper: the process that cleans up if the supervisor is killed (:mod:`.keeper`).

A keeper that ends is seen by its pidfd, and another takes its place. The supervisor tells it each rank that it starts: a rank
that has changed its title may have written over the environment by which the keeper would know it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eep.control.launch.processes import readable
from eep.control.supervisor import keeper

_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class KeeperProcess:
    """From :meth:`start` on, until :meth:`end` or until this process is gone, there is a keeper."""

    def __init__(
        self, directory: Path, marks: Sequence[str], note: Callable[[str, str], None], *, removes: bool
    ) -> None:
        """``marks``: see :class:`eep.control.supervisor.settings.LaunchSettings`. ``removes``: the directory too.
        ``note(phase, cause)`` writes a line to the event log."""
        self._command = [sys.executable, "-S", "-E", keeper.__file__, str(directory), str(os.getsid(0))]
        self._command += (["remove"] if removes else []) + [*marks]
        self._note = note
        self._held: set[int] = set()
        self._life: _KeeperLife | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._life.pid if self._life is not None else None

    def start(self) -> None:
        """OSError if there can be no keeper."""
        self._life = _KeeperLife(self._command)
        self._watch = asyncio.get_running_loop().create_task(self._replace_for_ever(self._life))

    def hold(self, pid: int) -> None:
        """This process, which leads a session, ends with the supervisor, and so do those of its session."""
        self._held.add(pid)
        if self._life is not None:
            self._life.tell(b"+%d\n" % pid)

    def release(self, pid: int) -> None:
        """It has ended; another process may have its number soon."""
        self._held.discard(pid)
        if self._life is not None:
            self._life.tell(b"-%d\n" % pid)

    async def end(self) -> None:
        """It has done what there is to do when this returns."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._life is not None:
            await self._life.end()
            self._life = None

    async def _replace_for_ever(self, life: _KeeperLife) -> None:
        pause = _PAUSE_S
        while True:
            await life.ended()
            self._life = None
            life.close()
            ended = life.pid
            while self._life is None:
                try:
                    life = await asyncio.to_thread(_KeeperLife, self._command)
                except OSError as error:
                    self._note("KEEPER", f"there is no keeper, and ranks would outlive this process: {error}")
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                else:
                    self._life = life
            for pid in self._held:
                life.tell(b"+%d\n" % pid)
            self._note("KEEPER", f"the keeper (process {ended}) has ended, and process {life.pid} takes its place")
            await asyncio.sleep(pause)  # one that always ends at once is not to take all the time there is
            pause = min(2 * pause, _LONGEST_PAUSE_S)


class _KeeperLife:
    """One process."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        # A session of its own, so that what kills the supervisor's group leaves the keeper to do its work.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        self._held, self._said = process.stdin, process.stdout
        try:
            said = self._said.readline()
            process.wait()  # a few milliseconds: what stays is its child, which has said its number
            if not said.strip().isdigit():
                raise OSError("the keeper ended before it had begun")
            self.pid = int(said)
            os.set_blocking(self._held.fileno(), False)
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            self._held.close()
            self._said.close()
            raise

    def tell(self, line: bytes) -> None:
        with suppress(OSError):  # it is gone and will be replaced, or it stands still
            os.write(self._held.fileno(), line)

    async def ended(self) -> None:
        await readable(self._pidfd)

    def close(self) -> None:
        self._held.close()
        self._said.close()
        os.close(self._pidfd)

    async def end(self) -> None:
        self._held.close()
        await asyncio.to_thread(self._said.read)  # it has nothing more to say; that ends when it does
        self.close()
