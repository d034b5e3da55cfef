"""What the driver of a store makes of entries that are no records."""

from __future__ import annotations

import asyncio

from eep.control.store.embedded_store import EmbeddedStore
from tests.control import ranks
from tests.control.harness import kill, record, runs_with, supervised, until


def test_a_report_of_ours_that_is_none_any_more_is_written_anew() -> None:
    async def body() -> None:
        store = EmbeddedStore()
        async with supervised(ranks.steady, 2, host="a", store=store) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            entry = await store.get("host/a/")
            assert entry is not None
            assert (await store.compare_and_swap("host/a/", entry.version, b"no report")).done
            before = record(supervisor).view.incarnations[0]
            kill(supervisor, 0)
            await until(supervisor, lambda: record(supervisor).view.incarnations[0] > before)
            await until(supervisor, runs_with(supervisor, (0, 1)))
            assert supervisor.journal.rejected["bad-record"]
            assert "internal" not in supervisor.journal.rejected, supervisor.journal.last_rejection
            entry = await store.get("host/a/")
            assert entry is not None
            assert entry.value != b"no report"

    asyncio.run(body())
