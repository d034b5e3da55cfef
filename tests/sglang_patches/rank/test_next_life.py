"""A rank that does not know yet which life it is: what it does at once, and what when it is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq

from eep.control.launch import spare_order
from eep.control.launch.processes import INCARNATION, RANK
from eep.observe import metrics
from sglang_patches.rank import late_sockets, next_life, whole_spare


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK, "3")
    monkeypatch.delenv(INCARNATION, raising=False)
    for name, value in (("_beginnings", []), ("_takings", []), ("_conditions", []), ("_joined_at", None)):
        monkeypatch.setattr(next_life, name, value)


def tell(monkeypatch: pytest.MonkeyPatch, rank: int, life: int) -> None:
    """Have the order of this process be there."""
    variables = {RANK: str(rank), INCARNATION: str(life)}
    monkeypatch.setattr(spare_order, "await_order", lambda: [monkeypatch.setenv(*each) for each in variables.items()])


def test_a_life_that_is_known_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK, "3")
    monkeypatch.setenv(INCARNATION, "2")
    begun: list[int] = []
    assert not next_life.is_awaited()
    next_life.when_begun(begun.append)
    assert begun == [2]
    next_life.await_beginning()
    assert begun == [2]


@pytest.mark.usefixtures("awaited")
def test_what_waits_for_the_life_is_called_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int]] = []
    for name in ("first", "second"):
        next_life.when_begun(lambda life, name=name: begun.append((name, life)))  # type: ignore[misc]
    assert next_life.is_awaited()
    assert begun == []
    tell(monkeypatch, 3, 5)
    next_life.await_beginning()
    assert begun == [("first", 5), ("second", 5)]
    next_life.await_beginning()
    assert len(begun) == 2


@pytest.mark.usefixtures("awaited")
def test_a_later_life_takes_what_it_is_to_have_when_the_last_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INCARNATION, "1")
    taken, is_free = [], False
    next_life.when_free(lambda: taken.append("caches"), lambda: is_free)
    next_life.when_free(lambda: taken.append("requests"))
    next_life.look_whether_free()
    assert taken == []
    is_free = True
    next_life.look_whether_free()
    next_life.look_whether_free()
    assert taken == ["caches", "requests"]


@pytest.mark.usefixtures("awaited")
def test_a_later_life_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INCARNATION, "1")
    taken: list[str] = []
    next_life.when_free(lambda: taken.append("caches"), lambda: False)
    next_life.look_whether_free()
    assert taken == []
    monkeypatch.setattr(next_life, "_joined_at", time.monotonic() - next_life.HELD_FOR)
    next_life.look_whether_free()
    assert taken == ["caches"]


@pytest.mark.usefixtures("awaited")
def test_a_first_life_has_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INCARNATION, "0")
    taken: list[str] = []
    next_life.when_free(lambda: taken.append("caches"), lambda: False)
    assert taken == ["caches"]


@pytest.mark.usefixtures("awaited")
def test_a_spare_becomes_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, 1, 5)
    with pytest.raises(RuntimeError, match="a spare of rank 3 was told to become rank 1"):
        next_life.await_beginning()


@pytest.mark.usefixtures("awaited")
def test_what_a_spare_counts_is_shown_to_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(metrics.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(metrics, "_named", None)
    whole_spare.hide_metrics(3)
    metrics.name_metric_files("spare-3")
    from prometheus_client import values

    before = values.ValueClass
    try:
        counted = values.ValueClass("counter", "n", "n_total", (), (), "help")
        counted.inc(7)
        assert list(tmp_path.glob("*.db")) == []
        tell(monkeypatch, 3, 1)
        next_life.await_beginning()
        counted.inc(2)
        assert [each.name for each in tmp_path.iterdir()] == ["counter_rank-3.db"]
        assert counted.get() == 2
    finally:
        values.ValueClass = before


@pytest.mark.usefixtures("awaited")
def test_a_spare_gets_no_message_of_its_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with zmq.Context() as context:
        sender, rank = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        address = f"ipc://{tmp_path}/s"
        sender.bind(address)
        rank.connect(address)

        def make(where: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
            made: zmq.Socket[bytes] = where.socket(kind)
            made.connect(address)
            return made

        spare = late_sockets._make(make, context, zmq.PULL)
        try:
            for number in range(4):
                sender.send(bytes([number]))
            assert [rank.recv() for _ in range(4)] == [bytes([number]) for number in range(4)]
            tell(monkeypatch, 3, 1)
            rank.close()
            next_life.await_beginning()
            assert not spare.poll(50), "it is not in yet"
            next_life.look_whether_free()
            deadline = time.monotonic() + 30
            while not spare.poll(10):  # what is sent before the end of the rank is seen is lost with it
                assert time.monotonic() < deadline
                sender.send(b"for the next life")
            assert spare.recv() == b"for the next life"
        finally:
            for each in (sender, rank, spare):
                each.close(linger=0)
