"""When a supervisor ends, however it ends, nothing that it started is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.harness import (
    PATIENCE,
    ROOT,
    children_of,
    until_gone,
)

PROGRAM = """
import asyncio, sys
from pathlib import Path
from eep.control.launch.processes import command_of
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Policy
from tests.control import ranks
async def main():
    supervisor = Supervisor(command_of(ranks.with_a_child), range(2), Policy(max_ranks=2))
    print(supervisor.directory.path, flush=True)
    await supervisor.run()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_supervisor_ends(number: signal.Signals) -> None:
    async def body() -> None:
        supervisor = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert supervisor.stdout is not None
        directory = Path((await asyncio.to_thread(supervisor.stdout.readline)).decode().strip())
        async with asyncio.timeout(PATIENCE):
            while len(pids := children_of(str(directory))) < 4:  # two ranks, and a child of each
                await asyncio.sleep(0.02)
            supervisor.send_signal(number)
            await asyncio.to_thread(supervisor.wait)
            await until_gone(pids)
            while directory.exists():
                await asyncio.sleep(0.01)
        assert not children_of(str(directory))
        supervisor.stdout.close()
        if number != signal.SIGKILL:
            assert supervisor.returncode == 0

    asyncio.run(body())
