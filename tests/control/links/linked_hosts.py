"""Several supervisors with links in one process, which share a store as hosts do."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from eep.control.launch.processes import command_of
from eep.control.store.embedded_store import EmbeddedStore
from eep.control.supervisor.settings import LaunchSettings, LinkSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.sealed_frames import new_key
from tests.control import ranks
from tests.control.harness import ROOT, patient_policy

KEY = new_key()
PER_HOST = 2


@asynccontextmanager
async def linked_hosts(
    count: int = 2, *, program: Any = ranks.steady, key: bytes = KEY, **settings: Any
) -> AsyncIterator[tuple[list[Supervisor], EmbeddedStore]]:
    """Host i has the ranks from ``2 * i`` on, and the address 127.0.1.i."""
    store = EmbeddedStore()
    settings = {"host_timeout_s": 30.0, **settings}
    async with AsyncExitStack() as stack:
        hosts = []
        for index in range(count):
            supervisor = Supervisor(
                command_of(program),
                range(index * PER_HOST, (index + 1) * PER_HOST),
                patient_policy(count * PER_HOST, first_view=count * PER_HOST),
                host=f"h{index}",
                launch=LaunchSettings(
                    environment={
                        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
                    }
                ),
                store=StoreSettings(store, 60.0),
                links=LinkSettings(f"127.0.1.{index + 1}", key, **settings),
            )
            await supervisor.start()
            stack.push_async_callback(supervisor.stop)
            hosts.append(supervisor)
        yield hosts, store
