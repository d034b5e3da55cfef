"""Which tests of servers belong together when several run at a time: those of a folder, which share a server, or a file."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)  # around xdist's, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(_HERE).parts[0]))
    yield
