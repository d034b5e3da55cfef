"""A group is destroyed in one thread while another calls it: the call is refused or ends, and is never left behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import eep
from eep.process_group.point_to_point import Messages
from eep.process_group.runner import Runner
from eep.process_group.work import EepWork
from eep.process_group.world import World
from eep.view import View
from tests.process_group.worlds import CALL_S, SOON, Worlds, enter, queue_sum

Make = Callable[[int], Worlds]


class Closer:
    """Has another thread close a group, once. Waits until it has, or for half a second where it must wait for the caller."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._thread: threading.Thread | None = None
        self._close = close

    def __call__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._close, daemon=True)
            self._thread.start()
            self._thread.join(0.5)

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join(SOON.total_seconds())
        assert not self._thread.is_alive()


@pytest.fixture
def world(worlds: Make) -> World:
    """Of rank 0, with a rank 1 that has the same groups and does nothing."""
    made = worlds(2)
    ranks = [made.start(rank) for rank in range(2)]
    enter(ranks, View(1, (0, 1), (0, 0)))
    ranks[1].open_lane("messages", range(2))
    return ranks[0]


@pytest.fixture
def messages(world: World) -> Messages:
    return Messages(world.endpoint, world.open_lane("messages", range(2)), CALL_S)


def test_a_rank_receives_nothing_from_itself(messages: Messages) -> None:
    """It sends itself nothing either. Both are said at once."""
    with pytest.raises(ValueError, match="this rank itself"):
        messages.receive(torch.zeros(1), 0, 0).wait(SOON)
    with pytest.raises(ValueError, match="this rank itself"):
        messages.send(torch.zeros(1), 0, 0).wait(SOON)


@pytest.mark.parametrize("alone", [False, True])
def test_a_message_of_any_rank_is_not_waited_for_where_no_other_is_left(worlds: Make, alone: bool) -> None:
    made = worlds(2)
    here, other = made.start(0), made.start(1)
    enter([here, other], View(1, (0, 1), (0, 0)))
    messages = Messages(here.endpoint, here.open_lane("messages", [0] if alone else [0, 1]), CALL_S)
    if not alone:
        other.close()
    with pytest.raises(eep.StepFailed, match="not in the view, or has left") as caught:
        messages.receive(torch.zeros(1), None, 0).wait(SOON)
    assert caught.value.ranks == (() if alone else (1,))


def check_not_left_behind(call: Callable[[], EepWork]) -> None:
    """It may go well or be refused; only waiting in vain is an error."""
    with contextlib.suppress(eep.EepError):
        call().wait(SOON)


def test_an_asynchronous_call(world: World) -> None:
    lane = world.open_lane("group", [0])
    runner = Runner("group", {"cpu": lane})
    queue_sum(runner, torch.ones(1)).wait(SOON)
    close, calls = Closer(runner.close), runner._queue._outermost.calls

    class Queue:
        get = calls.get

        def put(self, item: Any) -> None:
            if item is not None:
                close()
            calls.put(item)

    runner._queue._outermost.calls = Queue()  # type: ignore[assignment]
    check_not_left_behind(lambda: queue_sum(runner, torch.ones(1)))
    close.wait()
    with pytest.raises(eep.EepError, match="was destroyed"):
        queue_sum(runner, torch.ones(1))


def test_a_send(messages: Messages) -> None:
    messages.send(torch.ones(1), 1, 0).wait(SOON)
    close, put = Closer(messages.close), messages._senders[1].put

    class Queue:
        get = messages._senders[1].get

        def put(self, item: Any) -> None:
            if item is not None:
                close()
            put(item)

    messages._senders[1] = Queue()  # type: ignore[assignment]
    check_not_left_behind(lambda: messages.send(torch.ones(1), 1, 0))


def test_a_receive_that_comes_a_moment_later(messages: Messages) -> None:
    """After the thread that receives has ended."""
    messages.receive(torch.zeros(1), 1, 0)
    receiver = messages._receiver
    assert receiver is not None

    def end() -> None:
        messages.close()
        receiver.join()

    close = Closer(end)

    class Changed(threading.Condition):
        def __enter__(self) -> bool:
            if threading.current_thread() is threading.main_thread():
                close()
            return super().__enter__()

    messages._changed = Changed(messages._changed._lock)  # type: ignore[attr-defined]
    check_not_left_behind(lambda: messages.receive(torch.zeros(1), 1, 0))


def test_a_receive_that_is_about_to_wait(messages: Messages, monkeypatch: pytest.MonkeyPatch) -> None:
    close, pokes = Closer(messages.close), messages._lane.pokes

    def close_then_look() -> int:
        close()
        return pokes()

    monkeypatch.setattr(messages._lane, "pokes", close_then_look)
    check_not_left_behind(lambda: messages.receive(torch.zeros(1), 1, 0))
