"""One host of a test: ``python -m tests.control.store.host_program NAME RANKS CAPACITY DIRECTORY ENDPOINT...``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from eep.control.launch.processes import command_of
from eep.control.store.etcd_store import EtcdStore
from eep.control.supervisor.settings import DirectorySettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from tests.control import ranks
from tests.control.harness import patient_policy

LEASE_TTL = 8.0


async def main(name: str, members: str, capacity: str, directory: str, *endpoints: str) -> None:
    supervisor = Supervisor(
        command_of(ranks.steady),
        [int(rank) for rank in members.split(",")],
        patient_policy(int(capacity)),
        host=name,
        directory=DirectorySettings(Path(directory)),
        store=StoreSettings(EtcdStore(endpoints, "partitions", answer_within=1.0, listen_for=2.0), LEASE_TTL),
    )
    await supervisor.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
