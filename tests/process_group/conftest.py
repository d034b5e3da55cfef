from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process_group.members import GroupConfig, Members, members
from tests.process_group.worlds import Worlds


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Members]]:
    """Starts members in a rendezvous of their own; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(size: int = 4, **config: object) -> Members:
            timeout_ms = float(config.pop("timeout_ms", 60_000))  # type: ignore[arg-type]
            return stack.enter_context(
                members(tmp_path / "ranks", GroupConfig(size=size, **config), timeout_ms=timeout_ms)  # type: ignore[arg-type]
            )

        yield start


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[[int], Worlds]]:
    """Makes worlds of so many ranks in this process; they end with the test."""
    with contextlib.ExitStack() as stack:

        def make(size: int) -> Worlds:
            made = Worlds(tmp_path / "ranks", size)
            stack.callback(made.close)
            return made

        yield make
