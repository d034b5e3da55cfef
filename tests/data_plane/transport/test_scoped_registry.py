"""Users of one registry do not see each other's keys."""

from __future__ import annotations

from pathlib import Path

from eep.data_plane.transport.scoped_registry import ScopedRegistry
from eep.experts.registry.directory_registry import DirectoryRegistry


def test_each_scope_has_keys_of_its_own(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path / "registry")
    tokens, groups = ScopedRegistry(registry, "tokens"), ScopedRegistry(registry, "groups")
    tokens.publish("links/0.1/2.1", b"tokens")
    groups.publish("links/0.1/2.1", b"groups")
    assert tokens.scan("links/") == {"links/0.1/2.1": b"tokens"}
    tokens.withdraw("links/0.1/2.1")
    assert tokens.scan("") == {}
    assert groups.scan("links/0.1") == {"links/0.1/2.1": b"groups"}
    registry.close()
