"""A supervisor's side of its keeper: the process that cleans up if the supervisor is killed (:mod:`.keeper`)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from eep.control.supervisor import keeper


class KeeperProcess:
    """Runs from here on, until :meth:`end` or until this process is gone."""

    def __init__(self, directory: Path, marks: Sequence[str], *, removes: bool) -> None:
        """``marks``: see :class:`eep.control.supervisor.settings.LaunchSettings`. ``removes``: the directory too."""
        arguments = [sys.executable, "-S", "-E", keeper.__file__, str(directory), str(os.getsid(0))]
        arguments += (["remove"] if removes else []) + [*marks]
        # A session of its own, so that what kills the supervisor's group leaves the keeper to do its work.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, start_new_session=True)
        self._process.wait()  # a few milliseconds: what stays is its child

    async def end(self) -> None:
        """It has done what there is to do when this returns."""
        held, said = self._process.stdin, self._process.stdout
        assert held is not None
        assert said is not None
        held.close()
        await asyncio.to_thread(said.read)  # it has nothing to say; that ends when it does
        said.close()
