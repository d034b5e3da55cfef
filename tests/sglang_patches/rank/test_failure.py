"""A rank tells its supervisor of an exception that ends it, unless the exception is one of EEP's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eep.errors import EepError
from sglang_patches.rank import failure, rank_session


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the supervisor was told."""
    said: list[str] = []
    joined = SimpleNamespace(member=SimpleNamespace(fail=said.append))
    monkeypatch.setattr(rank_session, "_session", SimpleNamespace(joined=joined))
    monkeypatch.setattr(failure, "_evidence", None)
    return said


def run_until(error: Exception | None) -> None:
    """A scheduler's loop ends, with that error or without."""

    def loop() -> None:
        if error is not None:
            raise error

    failure.note_failure(loop)


def test_an_exception_is_told_when_it_was_logged(told: list[str]) -> None:
    with pytest.raises(IndexError):
        run_until(IndexError("7 is out of range"))
    assert told == [], "the supervisor would kill the rank before SGLang has logged the exception"
    failure.tell_failure()
    assert told == ["IndexError: 7 is out of range"]


def test_an_error_of_the_instance_is_no_fault_of_a_request(told: list[str]) -> None:
    with pytest.raises(EepError):
        run_until(EepError("no source has expert 3"))
    failure.tell_failure()
    assert told == []


def test_an_end_without_an_exception_is_not_told(told: list[str]) -> None:
    run_until(None)
    failure.tell_failure()
    assert told == []


def test_a_rank_that_has_not_joined_has_no_requests_to_blame(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_session, "_session", SimpleNamespace(joined=None))
    with pytest.raises(ValueError, match="bad weights"):
        run_until(ValueError("bad weights"))
    failure.tell_failure()
    assert told == []
