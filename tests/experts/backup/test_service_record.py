"""A backup service whose record has gone says again what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.errors import EepError
from eep.experts.backup.service import BackupOptions, BackupService
from eep.experts.registry.directory_registry import DirectoryRegistry, Registry
from eep.experts.registry.published_records import BACKUPS
from eep.experts.registry.store_registry import StoreRegistry
from tests.experts import model
from tests.experts.registry.test_store_registry import Shared

NUMBER = model.LAYERS * model.EXPERTS
KEY = BACKUPS + "host"


@pytest.fixture(params=["directory", "store"])
def registry(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Registry]:
    made: Any = DirectoryRegistry(tmp_path / "r") if request.param == "directory" else StoreRegistry(Shared().connect)
    yield made
    made.close()


@pytest.fixture
def service(tmp_path: Path, registry: Registry) -> Iterator[BackupService]:
    """Filled from a checkpoint, and read by no rank."""
    engine: Any = SimpleNamespace(session="127.0.0.1:1", expose=lambda memory: 4096, withdraw=lambda address: None)
    options = BackupOptions("host", 0, 1 << 30, checkpoint=str(model.save_checkpoint(tmp_path / "model")))
    made = BackupService(registry, engine, options, lambda said: None)
    made.start()
    yield made
    made.stop()


def test_what_it_keeps_is_published_again(registry: Registry, service: BackupService) -> None:
    assert service.refresh() == NUMBER
    before = registry.scan(BACKUPS)
    assert set(before) == {KEY}
    registry.withdraw(KEY)
    assert registry.scan(BACKUPS) == {}
    assert service.refresh() == 0
    assert registry.scan(BACKUPS) == before


def test_it_goes_on_to_fill_itself(registry: Registry, service: BackupService) -> None:
    registry.withdraw(KEY)
    assert service.refresh() == NUMBER
    assert set(registry.scan(BACKUPS)) == {KEY}


def test_a_registry_that_is_away_is_tried_again(
    registry: Registry, service: BackupService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.refresh() == NUMBER
    before = registry.scan(BACKUPS)
    registry.withdraw(KEY)
    said: list[str] = []
    service.tell = said.append

    def away(key: str, value: bytes) -> None:
        raise EepError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "publish", away)
        assert service.refresh() == 0
    assert any("the store does not answer" in each for each in said)
    assert service.refresh() == 0
    assert registry.scan(BACKUPS) == before
