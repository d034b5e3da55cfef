"""Long work says that it gets on, and only in the thread whose work the rank's progress word is about."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future

import pytest

from eep import long_work

SOON = 0.001


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by one whenever this thread says that it gets on."""
    found: list[int] = []
    monkeypatch.setattr(long_work, "_told", None)
    monkeypatch.setattr(long_work, "_SAYS_EVERY_S", SOON)
    long_work.tell(lambda: found.append(1))
    return found


def test_work_without_a_listener_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_work, "_told", None)
    long_work.get_on()


def test_only_the_thread_whose_work_it_is_is_heard(said: list[int]) -> None:
    other = threading.Thread(target=long_work.get_on)
    other.start()
    other.join()
    assert said == []
    long_work.get_on()
    assert said == [1]


def test_a_wait_says_again_and_again_that_the_thread_gets_on() -> None:
    future: Future[None] = Future()
    count = 0

    def hear() -> None:
        nonlocal count
        count += 1
        if count == 5:
            future.set_result(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_work, "_told", None)
        patch.setattr(long_work, "_SAYS_EVERY_S", SOON)
        long_work.tell(hear)
        assert long_work.wait_in_parts([future], 600.0) == ({future}, set())


def test_a_wait_has_an_end(said: list[int]) -> None:
    futures: list[Future[None]] = [Future(), Future()]
    futures[0].set_result(None)
    assert long_work.wait_in_parts(futures, 3 * SOON) == ({futures[0]}, {futures[1]})
    assert said


def test_a_wait_for_the_first_ends_with_it(said: list[int]) -> None:
    futures: list[Future[None]] = [Future(), Future()]
    futures[0].set_result(None)
    assert long_work.wait_in_parts(futures, 600.0, FIRST_COMPLETED)[0] == {futures[0]}
