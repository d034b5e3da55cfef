"""What an operator types, against a real supervisor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from eep import cli
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import RankStatus
from eep.observe.event_log import EventLog, parse_line, read_events
from eep.operations.role_file import write_roles
from tests.control import ranks
from tests.control.harness import kill, record, runs_with, supervised, until


class Operator:
    """Types commands of ``eep`` while a supervisor runs in this process."""

    def __init__(self, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
        self.supervisor, self._capsys = supervisor, capsys

    async def types(self, *words: str) -> tuple[int, str, str]:
        """The exit code, and what was printed on both streams."""
        code = await asyncio.to_thread(cli.main, (*words, "--dir", str(self.supervisor.directory.path)))
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err


def beside_two_ranks(capsys: pytest.CaptureFixture[str], body: Callable[[Operator], Awaitable[None]]) -> None:
    """Runs ``body`` once ranks 0 and 1 run."""

    async def run() -> None:
        async with supervised(ranks.steady, 2) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            await body(Operator(supervisor, capsys))

    asyncio.run(run())


def test_events_tell_how_a_rank_was_lost_and_when_the_others_ran_again(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        kill(operator.supervisor, 0)
        await until(operator.supervisor, runs_with(operator.supervisor, (1,)))
        await until(operator.supervisor, runs_with(operator.supervisor, (0, 1)))
        code, out, _ = await operator.types("events")
        assert code == 0
        assert "EXITED rank 0.0: rank 0 exited [SIGKILL]" in out
        assert "epoch 2 RUN" in out

    beside_two_ranks(capsys, body)


def test_events_as_json_are_the_lines_of_the_event_log(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        code, out, _ = await operator.types("events", "--json")
        assert code == 0
        told = [parse_line(line) for line in out.splitlines()]
        assert told
        assert told == list(read_events(operator.supervisor.directory.events))[: len(told)]

    beside_two_ranks(capsys, body)


def test_status_names_the_active_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        code, out, _ = await operator.types("status", "--json")
        assert code == 0
        assert json.loads(out)["active"] == [0, 1]

    beside_two_ranks(capsys, body)


def test_a_rank_is_removed_once_however_often_the_operation_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        for _ in range(2):
            code, _, _ = await operator.types("rank", "remove", "1", "--operation", "x")
            assert code == 0
        await until(operator.supervisor, runs_with(operator.supervisor, (0,)))
        await until(operator.supervisor, lambda: operator.supervisor.state.ranks[1].status is RankStatus.DOWN)

    beside_two_ranks(capsys, body)


def test_the_last_rank_that_serves_requests_is_not_removed(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        write_roles(operator.supervisor.directory.path, [1])
        code, _, told = await operator.types("rank", "remove", "0")
        assert code != 0
        assert "no rank that serves requests would stay" in told
        assert record(operator.supervisor).view.active == (0, 1)
        code, _, _ = await operator.types("rank", "remove", "1")
        assert code == 0
        await until(operator.supervisor, runs_with(operator.supervisor, (0,)))

    beside_two_ranks(capsys, body)


def test_status_is_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        code, out, _ = await operator.types("status")
        assert code == 0
        assert "2 of 2 ranks in" in out
        assert str(operator.supervisor.pids[1]) in out

    beside_two_ranks(capsys, body)


def test_a_server_is_scaled_and_the_command_waits_until_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        code, out, _ = await operator.types("scale", "1")
        assert (code, out.splitlines()[-1]) == (0, "done: 1 ranks serve")
        await until(operator.supervisor, lambda: operator.supervisor.state.ranks[1].status is RankStatus.DOWN)
        code, out, _ = await operator.types("scale", "3")
        assert code == 3
        assert "failed: there is room for 2 ranks" in out
        code, out, _ = await operator.types("rank", "launch", "1", "--wait")
        assert (code, out.splitlines()[-1]) == (0, "done: rank 1 is in")

    beside_two_ranks(capsys, body)


def test_a_request_about_a_rank_that_is_not_of_this_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        code, _, err = await operator.types("rank", "kill", "7")
        assert code == 1
        assert "rank 7 is not of this host" in err

    beside_two_ranks(capsys, body)


def test_no_supervisor_is_an_error_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--dir", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    assert cli.main(["events", "--dir", str(tmp_path)]) == 1
    assert "events.jsonl" in capsys.readouterr().err


def test_a_line_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "h")
    log.write("RUN", 3, "because", rank=1, incarnation=2, evidence="seen", operation="op")
    log.close()
    with path.open("a") as file:
        file.write('{"time": 1')
    (line,) = read_events(path)
    assert (line.phase, line.epoch, line.rank, line.incarnation, line.operation) == ("RUN", 3, 1, 2, "op")


@pytest.mark.parametrize("nonsense", ["", "{}", "[]", '{"time": 1}'])
def test_what_is_no_line_of_an_event_log_is_refused(nonsense: str) -> None:
    with pytest.raises(ValueError, match="not a line of an event log"):
        parse_line(nonsense)
