"""A served instance for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang_patches.api.served_instance import Served


@pytest.fixture
def served(sglang: None, tmp_path: Path) -> Served:
    tmp_path.chmod(0o700)
    return Served(tmp_path)
