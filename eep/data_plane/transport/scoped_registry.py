"""Several users of one registry, each with keys of its own: a rank has links for every buffer and for its process groups."""

from __future__ import annotations

from eep.data_plane.transport.remote_hosts import LinkRegistry


class ScopedRegistry:
    """The keys of ``registry`` that begin with ``scope``, without that."""

    def __init__(self, registry: LinkRegistry, scope: str) -> None:
        self._registry, self._scope = registry, f"{scope}/"

    def publish(self, key: str, value: bytes) -> None:
        self._registry.publish(self._scope + key, value)

    def withdraw(self, key: str) -> None:
        self._registry.withdraw(self._scope + key)

    def scan(self, prefix: str) -> dict[str, bytes]:
        found = self._registry.scan(self._scope + prefix)
        return {key.removeprefix(self._scope): value for key, value in found.items()}
