"""Named fault points outside of kernels, and orders for them from outside of the process."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep import cli, faults
from eep.control.private_directory import PrivateDirectory
from eep.faults import FaultPlan, orders
from eep.observe.event_log import read_events
from tests.control.harness import ROOT


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of a supervisor whose server may be drilled; this process obeys as its rank 2."""
    place = PrivateDirectory.create(tmp_path / "d").path
    orders.allow_in(place)
    orders.obey_in(place, 2, incarnation=5)
    yield place
    faults.obey(None)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long this process has slept on purpose, each time."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def test_every_point_is_passed_in_one_place_and_is_documented() -> None:
    folders = (ROOT / "eep", ROOT / "sglang_patches")
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    calls = re.findall(r"faults\.(?:at|loses)\((.*?)\)[:\n]", sources)
    passed = Counter(name for call in calls for name in re.findall(r'"([a-z_.]+)"', call))
    assert passed == Counter(faults.PLACES.keys())
    text = (ROOT / "docs" / "reference.md").read_text()
    assert [point for point in faults.points() if f"`{point}`" not in text] == []


def test_messages_are_lost_in_a_row_at_a_point_that_loses_them() -> None:
    faults.arm("request.received", "drop", skip=1, count=2)
    assert [faults.loses("request.received") for _ in range(5)] == [False, True, True, False, False]


def test_a_point_that_sleeps_loses_nothing(naps: list[float]) -> None:
    faults.arm("request.received", "sleep", sleep_ms=20)
    assert not faults.loses("request.received")
    assert naps == [0.02]


def test_a_point_acts_once_at_the_chosen_passing(naps: list[float]) -> None:
    faults.arm("step.again", "sleep", skip=2, sleep_ms=30)
    assert faults.armed() == ("step.again",)
    for _ in range(2):
        faults.at("step.again")
        faults.at("step.trusted")
    assert naps == []
    for _ in range(3):
        faults.at("step.again")
    assert naps == [0.03]
    faults.arm("step.again", "kill")
    faults.disarm()
    faults.at("step.again")
    assert faults.armed() == ()


def test_an_order_is_carried_out_once_and_shows_in_the_event_log(directory: Path, naps: list[float]) -> None:
    orders.give(directory, 3, "step.again", FaultPlan("kill"))  # of another rank
    orders.give(directory, 2, "step.again", FaultPlan("sleep", sleep_ms=20))
    for _ in range(3):
        faults.at("step.again")
    assert naps == [0.02]
    assert list(orders.pending(directory)) == [("rank-3", "step.again")]
    (line,) = read_events(directory / "events.jsonl")
    assert (line.phase, line.rank, line.incarnation, line.operation) == ("FAULT", 2, 5, "step.again")
    assert "sleep at step.again" in str(line)


def test_an_order_for_a_kernel_is_taken_up_between_steps_and_can_be_taken_back(directory: Path) -> None:
    orders.give(directory, 2, "dispatch.after_rows", FaultPlan("drop", count=3))
    faults.take_orders()
    assert faults.armed() == ("dispatch.after_rows",)
    assert orders.withdraw(directory) == 1
    faults.take_orders()
    assert faults.armed() == ()


def test_no_process_obeys_where_it_was_not_allowed(tmp_path: Path, naps: list[float]) -> None:
    place = PrivateDirectory.create(tmp_path / "d").path
    orders.obey_in(place, 2)
    (place / "faults").mkdir()
    orders.give(place, 2, "step.again", FaultPlan("sleep", sleep_ms=1))
    faults.at("step.again")
    assert naps == []
    for what in (["kill", "2"], ["drop", "--rank", "2"], ["arm", "2", "--point", "step.again"], ["disarm"]):
        assert cli.main(["fault", *what, "--dir", str(place)]) == 1


@pytest.mark.parametrize(
    ("rank", "point", "plan", "why"),
    [
        (2, "nowhere", FaultPlan("kill"), "there is no fault point 'nowhere'; choose one of dispatch.before_rows"),
        (2, "step.again", FaultPlan("explode"), "kill, stop, sleep, drop"),
        (2, "step.again", FaultPlan("drop"), "use dispatch.after_rows or combine.after_rows"),
        (2, "step.again", FaultPlan("kill", skip=-1), "cannot be negative"),
        (2, "dispatch.after_rows", FaultPlan("drop", count=0), "at least one"),
        (
            2,
            "supervisor.evidence",
            FaultPlan("sleep"),
            "the supervisor passes supervisor.evidence, not a rank: name no rank",
        ),
        (None, "step.again", FaultPlan("sleep"), "ranks pass step.again: say which"),
    ],
)
def test_what_cannot_be_ordered(directory: Path, rank: int | None, point: str, plan: FaultPlan, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        orders.give(directory, rank, point, plan)
    assert orders.pending(directory) == {}


def test_a_point_is_armed_once_at_a_time(directory: Path) -> None:
    orders.give(directory, 2, "step.again", FaultPlan("kill"))
    with pytest.raises(ValueError, match="armed already in rank-2"):
        orders.give(directory, 2, "step.again", FaultPlan("sleep"))
    assert list(orders.pending(directory)) == [("rank-2", "step.again")]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"action": "explode"}', '{"action": "kill", "skip": "x"}'])
def test_an_order_that_says_nothing_is_removed(directory: Path, text: str) -> None:
    (directory / "faults" / "rank-2@step.again").write_text(text)
    faults.at("step.again")
    assert orders.pending(directory) == {}
    assert faults.armed() == ()
