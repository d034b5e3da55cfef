from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.console.server_stand_in import Routes, serving


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("EEP_ADMIN_KEY", "secret")
    monkeypatch.setattr(Routes, "asked", [])
    monkeypatch.setattr(Routes, "states", ["running", "done"])
    monkeypatch.setattr(Routes, "streams", [])
    with serving() as server:
        yield f"http://127.0.0.1:{server.server_port}"
