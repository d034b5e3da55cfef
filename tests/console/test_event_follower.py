"""``eep events --follow --url``: nothing is missed over a cut, nothing comes twice, and a server that is gone is given up."""

from __future__ import annotations

import json

import pytest

from eep import cli
from eep.console import event_follower
from tests.console.server_stand_in import Routes, event


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_follower, "FIRST_WAIT_S", 0.0)


def follow(url: str) -> int:
    return cli.main(["events", "--follow", "--json", "--url", url])


def paths() -> list[str]:
    return [path for path, _, _ in Routes.asked]


def test_a_reader_that_was_cut_off_goes_on_after_the_last_line(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = [event("x.1", 1) + event("x.2", 2) + b"id: x.3\nda", 503, 502, event("x.3", 3), b"", 404]
    monkeypatch.setattr(Routes, "streams", streams)
    assert follow(url) == 1, "the last answer was that there is no such route"
    printed = capsys.readouterr()
    assert [json.loads(line)["epoch"] for line in printed.out.splitlines()] == [1, 2, 3]
    after = [path.partition("after=")[2] for path in paths()]
    assert after == ["", "x.2", "x.2", "x.2", "x.3", "x.3"], "half an event does not count"
    assert printed.err.count("asking again") == 3, "once for each time that it was cut off"


def test_a_server_that_is_gone_is_given_up_after_so_many_tries(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routes, "streams", [event("x.1", 1), *[503] * 100])
    assert follow(url) == 1
    assert len(paths()) == 1 + event_follower.MOST_TRIES


def test_a_server_that_never_answered_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routes, "streams", [503, event("x.1", 1)])
    assert follow(url) == 1
    assert len(paths()) == 1
