from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model."""
    pytest.importorskip("transformers")
    from eep.drill.tiny_model import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sglang() -> None:
    """Skips where SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; 'make setup-sglang' does it")
