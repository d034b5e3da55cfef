from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from eep.observe.event_feed import EventFeed
from eep.observe.event_log import notice_line
from sglang_patches.api.event_stream import MOST_STREAMS, EventStreams, encode_event


def line(phase: str, cause: str = "because") -> str:
    return json.dumps(asdict(notice_line(phase, cause)))


def test_an_event_carries_its_id_and_its_line() -> None:
    text = encode_event("life.7", line("RUN", "line\nbreak")).decode()
    first, second, *rest = text.split("\n")
    assert first == "id: life.7"
    assert json.loads(second.removeprefix("data: "))["cause"] == "line\nbreak"
    assert rest == ["", ""]
    assert b"UNREADABLE" in encode_event("life.8", "no json")


def test_a_stream_goes_on_after_the_line_that_its_reader_has_and_ends_with_the_server() -> None:
    async def body() -> list[bytes]:
        feed, ending = EventFeed("life"), [False]
        streams = EventStreams(feed, lambda: ending[0])
        for number in (1, 2, 3):
            feed.add(line(str(number)))
        said = []
        async for part in streams.stream("life.1"):
            said.append(part)
            assert streams.open == 1
            if b'"2"' in part:
                feed.add(line("4"))
            ending[0] = ending[0] or b'"4"' in part
        assert streams.open == 0
        return said

    said = b"".join(asyncio.run(asyncio.wait_for(body(), 20)))
    assert [number in said for number in (b'"1"', b'"2"', b'"3"', b'"4"')] == [False, True, True, True]


def test_streams_are_bounded() -> None:
    streams = EventStreams(EventFeed("life"), lambda: False)
    streams.open = MOST_STREAMS
    assert streams.is_full
