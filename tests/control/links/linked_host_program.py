"""One host: ``python -m tests.control.links.linked_host_program NAME RANKS CAPACITY DIRECTORY ADDRESS TIMEOUT ENDPOINT...``.

The lease is so long that it never ends: a host that is taken out was silent.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from eep.control.launch.processes import command_of
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.record_seal import RecordSeal
from eep.control.supervisor.settings import DirectorySettings, LinkSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from tests.control import ranks
from tests.control.harness import patient_policy

KEY = bytes(range(32))
LEASE_TTL = 3600.0


async def main(
    name: str, members: str, capacity: str, directory: str, address: str, timeout: str, *endpoints: str
) -> None:
    store = EtcdStore(endpoints, "linked", seal=RecordSeal(KEY), answer_within=float(timeout) / 3)
    supervisor = Supervisor(
        command_of(ranks.steady),
        [int(rank) for rank in members.split(",")],
        patient_policy(int(capacity)),
        host=name,
        directory=DirectorySettings(Path(directory), key=KEY),
        store=StoreSettings(store, LEASE_TTL),
        links=LinkSettings(address, KEY, host_timeout_s=float(timeout)),
    )
    await supervisor.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
