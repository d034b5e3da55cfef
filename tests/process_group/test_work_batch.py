"""Several works as one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import eep
from eep.process_group.work import EepWork
from eep.process_group.work_batch import WorkBatch
from tests.process_group.worlds import SOON

SHORT = timedelta(milliseconds=10)


@pytest.fixture
def works() -> list[EepWork]:
    return [EepWork("send", [torch.zeros(1)]), EepWork("recv", [torch.ones(2)])]


def test_it_is_over_when_all_are(works: list[EepWork]) -> None:
    batch = WorkBatch(works)
    works[0].end((0,))
    assert not batch.is_completed()
    with pytest.raises(TimeoutError, match="recv is not done"):
        batch.wait(SHORT)
    works[1].end((2,))
    assert batch.wait(SOON)
    assert batch.is_success()
    assert eep.pg.answered(batch) == (0, 2)
    assert [tensor.numel() for tensor in batch.result()] == [1, 2]


def test_a_failure_is_told_when_the_others_are_over(works: list[EepWork]) -> None:
    batch = WorkBatch(works)
    works[0].end(error=eep.StepFailed("rank 2 has died", (2,)))
    with pytest.raises(TimeoutError):
        batch.wait(SHORT)
    works[1].end((0,))
    with pytest.raises(eep.StepFailed, match="rank 2 has died"):
        batch.wait(SOON)
    assert batch.is_completed()
    assert not batch.is_success()


def test_its_future(works: list[EepWork]) -> None:
    batch = WorkBatch(works)
    future = batch.get_future()
    works[0].end((0,))
    works[1].end((0,))
    assert [tensor.numel() for tensor in future.wait()] == [1, 2]


def test_the_future_of_one_that_fails(works: list[EepWork]) -> None:
    future = WorkBatch(works).get_future()
    works[0].end((0,))
    works[1].end(error=eep.StepFailed("rank 2 has died", (2,)))
    with pytest.raises(RuntimeError, match="rank 2 has died"):
        future.wait()


def test_an_empty_one_is_over() -> None:
    batch = WorkBatch([])
    assert batch.wait(SOON)
    assert batch.get_future().wait() == []
