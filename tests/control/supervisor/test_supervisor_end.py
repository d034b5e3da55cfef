"""When a supervisor ends, however it ends, nothing that it started is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

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
        shared = Path("/dev/shm", f"eep-test-{uuid4().hex}")
        shared.touch()
        (directory / "sweep").write_text(f"{shared}*\n")
        async with asyncio.timeout(PATIENCE):
            while len(pids := children_of(str(directory))) < 4:  # two ranks, and a child of each
                await asyncio.sleep(0.02)
            supervisor.send_signal(number)
            await asyncio.to_thread(supervisor.wait)
            await until_gone(pids)
            while directory.exists():
                await asyncio.sleep(0.01)
        assert not children_of(str(directory))
        with pytest.raises(FileNotFoundError):
            shared.unlink()
        supervisor.stdout.close()
        if number != signal.SIGKILL:
            assert supervisor.returncode == 0

    asyncio.run(body())


KEPT_PROGRAM = """
import asyncio
from eep.control.launch.processes import command_of
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Policy
from tests.control import ranks
async def main():
    supervisor = Supervisor(command_of(ranks.titled), range(2), Policy(max_ranks=2))
    running = asyncio.create_task(supervisor.run())
    await supervisor.wait_until(lambda: supervisor.instance is not None and len(supervisor.instance.view.active) == 2)
    first = supervisor.keeper_pid
    print(supervisor.directory.path, first, *supervisor.pids.values(), flush=True)
    await supervisor.wait_until(lambda: supervisor.keeper_pid not in (None, first))
    print(supervisor.keeper_pid, flush=True)
    await running
asyncio.run(main())
"""


def test_a_keeper_that_is_killed_is_replaced_and_the_next_ends_what_is_stopped() -> None:
    """The ranks have titles, which were written over the environment by which a keeper could know them."""

    async def body() -> None:
        supervisor = subprocess.Popen(
            [sys.executable, "-c", KEPT_PROGRAM],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert supervisor.stdout is not None
        async with asyncio.timeout(PATIENCE):
            words = (await asyncio.to_thread(supervisor.stdout.readline)).decode().split()
            directory, first, *pids = Path(words[0]), *map(int, words[1:])
            assert children_of(str(directory)) == [], "the ranks can be found by their environment: nothing is tested"
            os.kill(first, signal.SIGKILL)
            second = int(await asyncio.to_thread(supervisor.stdout.readline))
            assert second != first
            os.kill(pids[0], signal.SIGSTOP)
            supervisor.kill()
            await asyncio.to_thread(supervisor.wait)
            await until_gone([*pids, second])
        assert not directory.exists()
        supervisor.stdout.close()

    asyncio.run(body())
