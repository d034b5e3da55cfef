"""Events over HTTP: listed, streamed, and bounded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from eep.observe.event_log import EventLog, notice_line
from sglang_patches.api.event_stream import MOST_STREAMS
from tests.sglang_patches.api.served_instance import Served, run


def test_events_are_listed_after_an_id_and_streams_are_bounded(served: Served, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host")
    log.write("RUN", 1, "first")
    log.write("REVOKED", 1, "second")

    async def body() -> None:
        while len((await served.ask("GET", "/eep/events?follow=false"))[1]) < 2:
            await asyncio.sleep(0.01)
        _, (second,) = await served.ask("GET", "/eep/events?follow=false&after=life.1")
        assert (second["id"], second["cause"]) == ("life.2", "second")
        _, found = await served.ask("GET", "/eep/events?follow=false", headers={"Last-Event-ID": "life.2"})
        assert found == []
        served.api.streams.open = MOST_STREAMS
        assert (await served.ask("GET", "/eep/events"))[0] == 429

    run(body)
    log.close()


def test_lines_that_cannot_be_read_are_listed_and_sent_as_such(served: Served, tmp_path: Path) -> None:
    strange = ["no json", "5", json.dumps({"time": float("nan")}), json.dumps(asdict(notice_line("RUN", "\ud800")))]
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in strange))

    async def body() -> None:
        while len((await served.ask("GET", "/eep/events?follow=false"))[1]) < 4:
            await asyncio.sleep(0.01)
        _, found = await served.ask("GET", "/eep/events?follow=false")
        assert [line["phase"] for line in found] == ["UNREADABLE"] * 3 + ["RUN"]

    run(body)
