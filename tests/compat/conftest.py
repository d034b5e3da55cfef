"""Processes that use the interface of another library."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from tests.compat.deep_ep_ranks import Fleet


@pytest.fixture
def fleet(tmp_path: pathlib.Path) -> Iterator[Fleet]:
    with contextlib.closing(Fleet(tmp_path)) as fleet:
        yield fleet
