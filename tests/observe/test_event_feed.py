from __future__ import annotations

import asyncio
from pathlib import Path

from eep.observe.event_feed import EventFeed, follow_log
from eep.observe.event_log import EventLog, parse_line


def test_a_reader_goes_on_after_the_line_that_it_has() -> None:
    feed = EventFeed("life")
    for number in range(1, 6):
        feed.add(f"line {number}")
    assert feed.after("")[0] == ("life.1", "line 1")
    assert [line for _, line in feed.after("life.3")] == ["line 4", "line 5"]
    assert feed.after(feed.newest) == []


def test_a_reader_of_another_life_or_with_a_strange_id_gets_everything() -> None:
    feed = EventFeed("life")
    feed.add("one")
    for ident in ("other.7", "life.x", "life.-1", "life." + "9" * 40, "", ".", "life"):
        assert [line for _, line in feed.after(ident)] == ["one"], ident


def test_old_lines_go_and_ids_stay() -> None:
    feed = EventFeed("life", most=3)
    for number in range(1, 8):
        feed.add(f"line {number}")
    assert feed.after("") == [("life.5", "line 5"), ("life.6", "line 6"), ("life.7", "line 7")]
    assert [line for _, line in feed.after("life.4")] == ["line 5", "line 6", "line 7"]
    assert [line for _, line in feed.after("life.6")] == ["line 7"]


def test_a_reader_who_has_missed_lines_is_told_how_many() -> None:
    feed = EventFeed("life", most=3)
    for number in range(1, 8):
        feed.add(f"line {number}")
    (ident, gap), *rest = feed.after("life.2")
    assert (ident, [line for _, line in rest]) == ("life.4", ["line 5", "line 6", "line 7"])
    assert (parse_line(gap).phase, parse_line(gap).cause) == ("MISSED", "2 lines before this one are not kept any more")
    assert feed.after(ident) == rest, "it is told once"


def test_a_reader_with_an_id_that_was_never_given_gets_everything() -> None:
    feed = EventFeed("life")
    assert feed.after("life.1") == []
    feed.add("one")
    assert feed.after("life.1") == []
    assert [line for _, line in feed.after("life.2")] == ["one"]
    assert [line for _, line in feed.after("life.999")] == ["one"]
    assert [line for _, line in feed.after("life.١")] == ["one"]


def test_a_wait_ends_with_the_next_line_and_at_its_limit() -> None:
    async def body() -> None:
        feed = EventFeed("life")
        await feed.wait(0.01)
        waits = asyncio.ensure_future(feed.wait(60))
        await asyncio.sleep(0)
        feed.add("line")
        await asyncio.wait_for(waits, 5)

    asyncio.run(body())


def test_a_log_is_followed_from_its_first_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host")
    log.write("RUN", 1, "first")

    async def body() -> list[str]:
        feed, loop = EventFeed("life"), asyncio.get_running_loop()
        ending = follow_log(tmp_path / "events.jsonl", lambda line: loop.call_soon_threadsafe(feed.add, line) and None)
        while not feed.after(""):
            await feed.wait(5)
        log.write("REVOKED", 1, "second")
        while len(feed.after("")) < 2:
            await feed.wait(5)
        ending.set()
        return [line for _, line in feed.after("")]

    first, second = asyncio.run(asyncio.wait_for(body(), 20))
    assert "first" in first
    assert "second" in second
    log.close()
