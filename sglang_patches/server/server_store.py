"""``--eep-store``: the supervisor keeps its views in etcd, under keys that no other server has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress

from eep.control.store.embedded_store import RecordStore, StoreError
from eep.control.store.etcd_gateway import StoreRefusal
from eep.control.store.etcd_store import EtcdStore
from eep.control.store.key_value import ABSENT, LeaseEndedError, Swap
from eep.control.store.record_seal import RecordSeal
from eep.control.wire.sealed_frames import new_key
from sglang_patches import store_access
from sglang_patches.options import StoreOptions
from sglang_patches.server import store_flags
from sglang_patches.store_access import StoreAccess

logger = logging.getLogger(__name__)
_KEPT_FOR = 3600.0
"""Seconds. An etcd that was away for longer has forgotten the server; the operator must start it again."""
_WHAT_TO_CHECK = {
    False: "check the address, and that etcd runs",
    # An etcd that does not accept the certificate of a client says so, or resets the connection before that is read.
    True: "check the address, that etcd runs and, if it asks its clients for certificates, --eep-store-cert and "
    "--eep-store-key",
}
"""When etcd does not answer, without TLS and with it."""
_ANSWERS_AT_START = 10.0
"""Seconds. No rank waits yet, and a busy machine takes a while to check certificates."""
_TRIED_FOR = 30.0
"""Seconds after which what a server wrote to try etcd out goes by itself."""


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


def check_reachable(wanted: StoreOptions) -> None:
    """SystemExit if no node of etcd lets this server read and write, or if a file that it takes is missing."""
    try:
        asyncio.run(_try_out(store_access.read_access(wanted)))
    except StoreRefusal as refusal:
        raise SystemExit(f"--eep-store {wanted.url}: {refusal}; {store_flags.advice(refusal, wanted)}") from None
    except (ValueError, StoreError) as error:
        raise SystemExit(f"--eep-store {wanted.url}: {error}") from None


async def _try_out(access: StoreAccess) -> None:
    """Write and remove a key, at the first node that answers. Raises what the last one says."""
    store = _open(access, f"try-{secrets.token_hex(6)}", RecordSeal(new_key()), answer_within=_ANSWERS_AT_START)
    for left in reversed(range(len(access.endpoints))):
        try:
            await store.compare_and_swap("try", ABSENT, b"", await store.grant(_TRIED_FOR))
            await store.clear()
            return
        except StoreRefusal:
            raise
        except (StoreError, LeaseEndedError) as error:
            if not left:
                raise StoreError(f"{error}; {_WHAT_TO_CHECK[access.tls is not None]}") from error


def open_store(wanted: StoreOptions | None, key: bytes, instance: str | None = None) -> RecordStore | None:
    """The store for a supervisor, or None: then it uses the one inside it. What the store holds is sealed with ``key``, the
    one of the server's private directory. A random name keeps the keys of servers apart. The hosts of an ``instance`` share
    its name, and its record stays in the store: a host that ends may be followed by others that go on."""
    if wanted is None:
        return None
    if instance is not None:
        return store_access.open_shared(wanted, key, instance)
    name = f"{socket.gethostname()}-{secrets.token_hex(6)}"
    logger.info("eep: the supervisor keeps its views in etcd at %s, under /eep/%s/", wanted.url, name)
    return _open(store_access.read_access(wanted), name, RecordSeal(key))


def _open(access: StoreAccess, name: str, seal: RecordSeal, answer_within: float = 2.0) -> ServerStore:
    return ServerStore(
        access.endpoints,
        name,
        user=access.user,
        password=access.password,
        tls=access.tls,
        seal=seal,
        answer_within=answer_within,
    )
