"""Which tests of servers belong together when several run at a time: those of a folder, which share a server, or a file.

And how long each may take where its file does not say so: any test may be the one that has to start the server.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_PATIENCE_S = 900


@pytest.hookimpl(wrapper=True)  # around xdist's, which reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    ours = [item for item in items if item.path.is_relative_to(_HERE)]
    for item in ours:
        item.add_marker(pytest.mark.xdist_group(item.path.relative_to(_HERE).parts[0]))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_PATIENCE_S))
    yield
    if config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in ours):
        raise pytest.UsageError("xdist did not group the tests of servers: each worker would start every server itself")
