"""``--eep-store``: the supervisor keeps its views in etcd, under keys that no other server has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

from eep.control.store.embedded_store import RecordStore, StoreError
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.key_value import LeaseEndedError, Swap

logger = logging.getLogger(__name__)
_KEPT_FOR = 3600.0
"""Seconds. An etcd that was away for longer has forgotten the server; the operator must start it again."""


class ServerStore(EtcdStore):
    """The store of one server. Its keys end when it is closed, or at most an hour after the server was killed: they hang on
    a lease that is renewed along with the supervisor's own."""

    _life: int | None = None
    _renewed = 0.0

    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> Swap[bytes]:
        if lease is not None:
            return await super().compare_and_swap(key, expected, value, lease)
        if self._life is None:
            self._life, self._renewed = await self.grant(_KEPT_FOR), time.monotonic()
        try:
            return await super().compare_and_swap(key, expected, value, self._life)
        except LeaseEndedError as error:
            self._life = None
            raise StoreError(f"etcd has forgotten this server, which must be started again: {error}") from error

    async def keep_alive(self, lease: int) -> bool:
        if self._life is not None and time.monotonic() > self._renewed + _KEPT_FOR / 10:
            with suppress(StoreError):
                await super().keep_alive(self._life)
                self._renewed = time.monotonic()
        return await super().keep_alive(lease)

    async def close(self) -> None:
        with suppress(StoreError, LeaseEndedError):
            await self.clear()
        # Also when that failed: what was written without a lease of its own ends with this one.
        if self._life is not None:
            with suppress(StoreError, LeaseEndedError):
                await self.end_lease(self._life)
        await super().close()


def parse_endpoints(url: str) -> tuple[str, ...]:
    """The nodes that ``url`` names, with commas between them. ValueError if one is not named as it should be."""
    found = tuple(each.strip() for each in url.split(","))
    for each in found:
        parts = urlsplit(each)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"a node of etcd is named like http://127.0.0.1:2379, not {each!r}")
        if parts.username is not None:
            raise ValueError(
                "a user and password in the address of etcd are not supported; use an etcd that needs none"
            )
        _ = parts.port  # ValueError if it is no number
    return found


def check_reachable(url: str) -> None:
    """SystemExit if no etcd answers at ``url``."""
    try:
        asyncio.run(EtcdStore(parse_endpoints(url), "probe").get("probe"))
    except (ValueError, StoreError) as error:
        raise SystemExit(f"--eep-store {url}: {error}") from None


def open_store(url: str) -> RecordStore | None:
    """The store for a supervisor, or None: then it uses the one inside it. A random name keeps the keys of servers apart."""
    if not url:
        return None
    name = f"{socket.gethostname()}-{secrets.token_hex(6)}"
    logger.info("eep: the supervisor keeps its views in etcd at %s, under /eep/%s/", url, name)
    return ServerStore(parse_endpoints(url), name)
