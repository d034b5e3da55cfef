"""The line about a change waits a moment for what the front end tells, and is JSON where that is asked for."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from eep.control.supervisor.change_log import ChangeLog
from eep.control.watcher import Watcher
from eep.membership import Effect, Notify, Phase, PhaseChanged, RankGone
from eep.observe.change_summary import EndedChange, MovedTold, RepairTold
from eep.view import View
from tests.control import ranks
from tests.control.harness import kill, record, runs_with, supervised, until


def change(epoch: int, *lives: int) -> list[Effect]:
    active = tuple(rank for rank, life in enumerate(lives) if life >= 0)
    return [
        PhaseChanged("REVOKED", epoch - 1),
        Notify(View(epoch, active, lives), Phase.RUN),
        PhaseChanged("RUN", epoch),
    ]


def test_a_report_that_comes_after_the_change_is_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    told: list[EndedChange] = []

    async def body() -> None:
        log = ChangeLog(lambda: 0.0, also=told.append)
        for effect in [*change(1, 0, 0), RankGone(1, 0, "dying"), *change(2, 0, -1)]:
            log(effect)
        log.hear(MovedTold(1, 0, 5))
        for effect in change(3, 0, 1):
            log(effect)
        log.hear(MovedTold(1, 0, 2))
        log.hear(MovedTold(0, 0, 9))  # of a life that no change has lost yet
        while len(told) < 3:
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(body(), 30))
    assert [each.moved for each in told] == [0, 7, 0]
    assert "rank 1 lost (exit): 0 ms to agree, 0 ms repair, 7 requests moved, 0 ms in all" in caplog.text


def test_a_line_is_json_where_sglangs_are(caplog: pytest.LogCaptureFixture) -> None:
    log = ChangeLog(lambda: 0.0, as_json=True)
    log.hear(RepairTold(0, 1, 3, {"disk": 7}))
    with caplog.at_level(logging.INFO):
        for effect in change(1, 0, 0):
            log(effect)
    (line,) = caplog.messages
    told = json.loads(line)
    assert (told["event"], told["joined"], told["experts"], told["bytes"]) == ("eep.change", [0, 1], 3, {"disk": 7})
    assert told["timestamp"]
    assert log.status() == {"under_way": None, "last": {name: told[name] for name in log.status()["last"]}}


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_each_rank_that_settles_has_a_line_also_if_it_brought_nothing_in(
    as_json: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log, effects = ChangeLog(lambda: 0.0, as_json=as_json), change(1, 0, 0)
    with caplog.at_level(logging.INFO):
        for effect in effects[:2]:
            log(effect)
        log.hear(RepairTold(0, 1, 3, {"disk": 3 << 20, "peer": 0}))
        log.hear(RepairTold(1, 1, 0, {}))
        log.hear(RepairTold(1, 0, 2, {"disk": 5}))  # of an epoch that is over
        log(effects[2])
    *settled, summary = caplog.messages
    assert "eep.change" in summary or "joined" in summary
    if not as_json:
        assert settled == [
            "eep: rank 0 settled in epoch 1 after 0 ms (3 experts, 3.0 MiB from disk)",
            "eep: rank 1 settled in epoch 1 after 0 ms",
        ]
        return
    told = [json.loads(line) for line in settled]
    assert [(each["event"], each["epoch"], each["rank"], each["settled_ms"]) for each in told] == [
        ("eep.settled", 1, 0, 0.0),
        ("eep.settled", 1, 1, 0.0),
    ]
    assert [(each["experts"], each["bytes"]) for each in told] == [(3, {"disk": 3 << 20}), (0, {})]
    assert all(each["timestamp"] for each in told)


def test_ranks_and_watchers_tell_their_part_over_the_wire() -> None:
    async def body() -> None:
        async with supervised(ranks.brings_in_experts, 2) as supervisor:
            heard: list[object] = []
            supervisor.watch_reports(heard.append)
            await until(supervisor, runs_with(supervisor, (0, 1)))
            watcher = Watcher(supervisor.directory.path, lambda *_: None, lambda *_: None)
            kill(supervisor, 1)
            await until(supervisor, lambda: record(supervisor).view.incarnations[1] > 0)
            async with asyncio.timeout(60):
                while MovedTold(1, 0, 4) not in heard:
                    watcher.say_moved(1, 0, 4)
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(watcher.close)
            assert any(isinstance(each, RepairTold) and (each.rank, each.experts) == (0, 2) for each in heard)

    asyncio.run(body())
