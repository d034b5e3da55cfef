"""Counts on which all ranks of a view agree: those of its first rank, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.experts.agreed_load import AgreedLoad
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.view import View
from tests.experts.covered import counts_of


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[DirectoryRegistry]:
    made = DirectoryRegistry(tmp_path / "held")
    yield made
    made.close()


def load_of(registry: DirectoryRegistry, rank: int) -> AgreedLoad:
    return AgreedLoad(registry, rank, 0, lambda: counts_of(rank))


def is_alive(rank: int) -> bool:
    return True


def is_gone(rank: int) -> bool:
    return False


def test_no_rank_waits_for_the_counts_of_a_rank_that_is_gone(registry: DirectoryRegistry) -> None:
    assert load_of(registry, 1).of(View(1, (0, 1), (0, 0)), is_gone) is None


def test_all_ranks_take_the_counts_of_the_first(registry: DirectoryRegistry) -> None:
    view, first = View(1, (0, 1), (0, 0)), load_of(registry, 0)
    assert first.of(view, is_alive) is not None
    found = load_of(registry, 1).of(view, is_gone)
    assert found is not None
    assert (found == counts_of(0)).all()


def test_a_record_that_holds_no_counts_is_not_taken(registry: DirectoryRegistry) -> None:
    registry.publish("load/r0.i0", (2).to_bytes(8, "little") + b"neither numbers nor as many as there should be")
    assert load_of(registry, 1).of(View(2, (0, 1), (0, 0)), is_alive) is None


def test_no_rank_waits_for_the_counts_of_an_epoch_that_the_first_rank_has_left(registry: DirectoryRegistry) -> None:
    first = load_of(registry, 0)
    assert first.of(View(9, (0, 1), (0, 0)), is_alive) is not None
    assert load_of(registry, 1).of(View(8, (0, 1), (0, 0)), is_alive) is None
