"""A host whose fork server is a copy of itself: ``python -m tests.control.launch.forking_program``.

It prints the process ids of the fork server and of its ranks when they run, and then obeys lines: ``kill RANK``,
``kill server``, ``stop``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.fork_server import ForkServerProcess, fork_here
from eep.control.launch.processes import entry_name
from eep.control.supervisor.settings import LaunchSettings
from eep.control.supervisor.supervisor import Supervisor
from tests.control import ranks
from tests.control.harness import PATIENCE, patient_policy, runs_with, until

MARK = "EEP_TEST_FORKED"
RANKS = (0, 1)


async def main(first: ForkServerProcess) -> None:
    os.environ["EEP_TEST_SET_LATER"] = "known"
    launcher = ForkLauncher(entry_name(ranks.steady_if_it_knows), preload=["tests.control.ranks"], first=first)
    supervisor = Supervisor(
        launcher,
        RANKS,
        patient_policy(len(RANKS)),
        launch=LaunchSettings(marks=(f"{MARK}={os.environ[MARK]}",)),
    )
    await supervisor.start()
    try:
        while True:
            run = runs_with(supervisor, RANKS)
            await until(supervisor, lambda run=run: run() and set(supervisor.pids) == set(RANKS))
            print("running", launcher.server_pid, *(supervisor.pids[rank] for rank in RANKS), flush=True)
            asked = (await asyncio.to_thread(sys.stdin.readline)).split()
            if asked == ["stop"]:
                break
            victim = launcher.server_pid if asked[1] == "server" else supervisor.pids[int(asked[1])]
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                while victim in (launcher.server_pid, *supervisor.pids.values()) or launcher.server_pid is None:
                    await asyncio.sleep(0.01)
    finally:
        await supervisor.stop()
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(fork_here()))
