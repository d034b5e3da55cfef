"""``--eep-store``: the supervisor agrees on views in etcd, under keys that no other server has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from eep.control.etcd import EtcdStore
from eep.control.store import Store, StoreError

logger = logging.getLogger(__name__)


class ServerStore(EtcdStore):
    """The store of one server: its keys end with it."""

    async def close(self) -> None:
        with suppress(StoreError):  # it is away; a record of a few hundred bytes stays
            await self.clear()
        await super().close()


def endpoints(url: str) -> tuple[str, ...]:
    """The nodes that ``url`` names, with commas between them. ValueError if it does not."""
    found = tuple(each.strip() for each in url.split(","))
    for each in found:
        parts = urlsplit(each)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"a node of etcd is named like http://127.0.0.1:2379, not {each!r}")
        if parts.username is not None:
            raise ValueError("a user and a password of etcd are not supported")
        _ = parts.port  # ValueError if it is none
    return found


def check(url: str) -> None:
    """SystemExit if there is no etcd that answers."""
    try:
        asyncio.run(EtcdStore(endpoints(url), "probe").get("probe"))
    except (ValueError, StoreError) as error:
        raise SystemExit(f"--eep-store {url}: {error}") from None


def open_store(url: str) -> Store | None:
    """For a supervisor; None for the one inside it. A name of its own keeps this server's keys apart from all others."""
    if not url:
        return None
    name = f"{socket.gethostname()}-{secrets.token_hex(6)}"
    logger.info("eep: views are agreed on at %s, under /eep/%s/", url, name)
    return ServerStore(endpoints(url), name)
