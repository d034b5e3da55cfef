"""What an operator types, against a real supervisor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from eep import cli
from eep.membership import RankStatus
from eep.observe.event_log import EventLog, parse_line, read_events
from tests.control import ranks
from tests.control.harness import kill, runs_with, supervised, until


def test_events_status_and_requests(capsys: pytest.CaptureFixture[str]) -> None:
    async def eep(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(cli.main, arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    async def body() -> None:
        async with supervised(ranks.steady, 2) as supervisor:
            where = ("--dir", str(supervisor.directory.path))
            await until(supervisor, runs_with(supervisor, (0, 1)))
            kill(supervisor, 0)
            await until(supervisor, runs_with(supervisor, (1,)))
            await until(supervisor, runs_with(supervisor, (0, 1)))

            code, out, _ = await eep("events", *where)
            assert code == 0
            assert "EXITED rank 0.0: rank 0 exited [SIGKILL]" in out
            assert "epoch 2 RUN" in out
            code, out, _ = await eep("events", "--json", *where)
            assert [parse_line(line) for line in out.splitlines()] == list(read_events(supervisor.directory.events))

            code, out, _ = await eep("status", *where)
            assert json.loads(out)["active"] == [0, 1]

            assert (await eep("rank", "remove", "1", "--operation", "x", *where))[0] == 0
            assert (await eep("rank", "remove", "1", "--operation", "x", *where))[0] == 0
            await until(supervisor, runs_with(supervisor, (0,)))
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.DOWN)
            code, _, err = await eep("rank", "kill", "7", *where)
            assert code == 1
            assert "rank 7 is not of this host" in err

    asyncio.run(body())


def test_no_supervisor_is_an_error_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--dir", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    assert cli.main(["events", "--dir", str(tmp_path)]) == 1
    assert "events.jsonl" in capsys.readouterr().err


def test_a_line_that_is_half_written_is_left_out_and_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "h")
    log.write("RUN", 3, "because", rank=1, incarnation=2, evidence="seen", operation="op")
    log.close()
    with path.open("a") as file:
        file.write('{"time": 1')
    (line,) = read_events(path)
    assert (line.phase, line.epoch, line.rank, line.incarnation, line.operation) == ("RUN", 3, 1, 2, "op")
    for nonsense in ("", "{}", "[]", '{"time": 1}'):
        with pytest.raises(ValueError, match="not a line of an event log"):
            parse_line(nonsense)
