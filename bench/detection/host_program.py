"""One host of ``python -m bench.detection``: a supervisor that writes down when it revoked an epoch and when it saw a view.

``python -m bench.detection.host_program NAME RANKS CAPACITY DIRECTORY ADDRESS TIMEOUT ENDPOINT...``; a timeout
of 0: no links.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from eep.control.launch.processes import command_of
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.control.supervisor.settings import DirectorySettings, LinkSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Effect, Notify, Policy, Revoke
from tests.control import ranks

KEY = bytes(range(32))
MOMENTS = "moments"
"""The file in the host's directory: a line for each of them, with the time of the clock that all hosts here share."""


class Moments:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, effect: Effect) -> None:
        match effect:
            case Revoke(epoch=epoch):
                self._write("revoke", epoch)
            case Notify(view=view):
                self._write("view", view.epoch)

    def _write(self, what: str, epoch: int) -> None:
        self._file.write(json.dumps([what, epoch, time.monotonic_ns()]) + "\n")


async def main(
    name: str, members: str, capacity: str, directory: str, address: str, timeout: str, *endpoints: str
) -> None:
    supervisor = Supervisor(
        command_of(ranks.steady),
        [int(rank) for rank in members.split(",")],
        Policy(max_ranks=int(capacity), relaunch_limit=10**6, relaunch_backoff=0.01, longest_backoff=0.1),
        host=name,
        directory=DirectorySettings(Path(directory), key=KEY),
        store=StoreSettings(EtcdStore(endpoints, "detection", seal=RecordSeal(KEY), answer_within=0.5)),
        links=LinkSettings(address, KEY, host_timeout_s=float(timeout)) if float(timeout) else None,
    )
    with (Path(directory) / MOMENTS).open("a", buffering=1) as file:
        supervisor.watch_effects(Moments(file))
        await supervisor.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
