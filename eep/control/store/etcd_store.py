"""A store on etcd 3, through its HTTP/JSON gateway: it outlives the loss of any minority of its nodes.

Reads are linearizable, which is etcd's default, so a node cut off from the majority does not answer.

Other clients of etcd may be able to write to our keys. With the job's key, every value is sealed (:mod:`.record_seal`).
A value of theirs is never read. Where it replaced one of ours, etcd's history has ours, and we put it back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from eep.control.store.embedded_store import Listing, StoreError
from eep.control.store.etcd_gateway import EtcdGateway
from eep.control.store.key_value import Change, LeaseEndedError, StoredValue, Swap
from eep.control.store.record_seal import RecordSeal

logger = logging.getLogger(__name__)
MOST_OVERWRITES = 16
"""How often in a row others may write to a key of ours before we give up on what was there."""
_MOST_NAMED = 100
"""Keys that the log names because others wrote to them."""


class EtcdStore:
    """``namespace`` keeps the keys of one job apart from those of others."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        namespace: str,
        *,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        seal: RecordSeal | None = None,
        answer_within: float = 2.0,
        listen_for: float = 5.0,
    ) -> None:
        """Without a ``seal``, what any client of etcd writes to these keys is believed."""
        self._gateway = EtcdGateway(endpoints, user, password, tls, answer_within)
        self._prefix = f"/eep/{namespace}/"
        self._seal = seal
        self._overwritten: set[str] = set()
        self._listen_for = listen_for

    async def get(self, key: str) -> StoredValue[bytes] | None:
        answer = await self._gateway.call("kv/range", {"key": self._key(key)})
        return await self._entry(_only(answer))

    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> Swap[bytes]:
        sealed = value if self._seal is None else self._seal.seal(self._prefix + key, value)
        put = {"key": self._key(key), "value": _b64(sealed), "lease": str(lease or 0)}
        done, answer = await self._swap(put["key"], expected, {"request_put": put})
        if done:
            return Swap(True, StoredValue(value, int(answer["header"]["revision"])))
        found = _only(answer["responses"][0]["response_range"])
        entry = await self._entry(found)
        if entry is None and found is not None:
            raise StoreError(
                f"{self._prefix + key!r} in etcd holds what was written without the key of this job; give all hosts of the "
                "job the same key, or remove what is there and take the right to write to /eep/ from other clients"
            )
        return Swap(False, entry)

    async def _swap(self, name: str, expected: int, change: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        answer = await self._gateway.call(
            "kv/txn",
            {
                "compare": [{"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}],
                "success": [change],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        return bool(answer.get("succeeded")), answer

    async def remove(self, key: str, expected: int) -> bool:
        name = self._key(key)
        done, _ = await self._swap(name, expected, {"request_delete_range": {"key": name}})
        return done

    async def watch(self, prefix: str) -> AsyncGenerator[Listing | Change[bytes], None]:
        """Lists again after a while of silence: a node that hangs looks just like a quiet one."""
        span = {"key": self._key(prefix), "range_end": _after(self._prefix + prefix)}
        while True:
            answer = await self._gateway.call("kv/range", span)
            version = int(answer["header"]["revision"])
            found = {self._short(kv): await self._entry(kv) for kv in answer.get("kvs", [])}
            yield Listing({name: entry for name, entry in found.items() if entry is not None}, version)
            request = {"create_request": {**span, "start_revision": str(version + 1)}}
            endpoint = self._gateway.endpoint
            async with aclosing(self._gateway.post(endpoint, "watch", request)) as answers:
                while (heard := await self._hear(endpoint, answers)) is not None:
                    for event in heard.get("events", []):
                        kv, deleted = event["kv"], event.get("type") == "DELETE"
                        value = None if deleted else self._open(kv)
                        if deleted or value is not None:
                            yield Change(self._short(kv), value, int(kv["mod_revision"]))
                        else:
                            await self._entry(kv)  # what it puts back comes here next

    async def _hear(self, endpoint: str, answers: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
        """The next answer of a watch; None after so long a silence that the caller should list again."""
        try:
            async with asyncio.timeout(self._listen_for) as patience:
                with self._gateway.listening(endpoint, patience):
                    result: dict[str, Any] = (await anext(answers)).get("result", {})
        except TimeoutError:
            return None
        except StopAsyncIteration:
            result = {"canceled": True}
        if result.get("canceled"):
            self._gateway.leave(endpoint)
            raise StoreError("etcd ended a watch; list again and go on from there")
        return result

    async def grant(self, ttl: float) -> int:
        # etcd counts whole seconds, and a lease must never end early.
        answer = await self._gateway.call("lease/grant", {"TTL": str(math.ceil(ttl))})
        return int(answer["ID"])

    async def keep_alive(self, lease: int) -> bool:
        answer = await self._gateway.call("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def end_lease(self, lease: int) -> None:
        try:
            await self._gateway.call("lease/revoke", {"ID": str(lease)})
        except LeaseEndedError:
            pass  # it has ended, which is what was wanted

    async def clear(self) -> None:
        """Remove every key of this namespace: its job is over."""
        await self._gateway.call("kv/deleterange", {"key": self._key(""), "range_end": _after(self._prefix)})

    async def close(self) -> None:
        """Nothing to do: each call has a connection of its own, and ends it."""

    # What is ours, and what others wrote.

    async def _entry(self, kv: dict[str, Any] | None) -> StoredValue[bytes] | None:
        """Our value under a key, of which etcd says ``kv``; put back if others replaced it. None if we have none there."""
        for _ in range(MOST_OVERWRITES):
            if kv is None:
                return None
            if (value := self._open(kv)) is not None:
                return StoredValue(value, int(kv["mod_revision"]))
            if (ours := await self._before(kv)) is None:
                return None
            kv = await self._put_back(kv, ours)
        raise StoreError("another client of etcd keeps writing to keys under /eep/; take its right to do so away")

    async def _before(self, kv: dict[str, Any] | None) -> dict[str, Any] | None:
        """The last value of ours before that of others. None if there was none, or etcd has forgotten it."""
        for _ in range(MOST_OVERWRITES):
            if kv is None or int(kv.get("version", 1)) <= 1:  # the first value of this key
                return None
            before = {"key": kv["key"], "revision": str(int(kv["mod_revision"]) - 1)}
            try:
                kv = _only(await self._gateway.call("kv/range", before))
            except StoreError as error:
                if "compacted" in str(error):
                    return None
                raise
            if kv is not None and self._open(kv) is not None:
                return kv
        return None

    async def _put_back(self, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any] | None:
        """What the key holds after that; None if it holds nothing, as when the lease of our value has ended."""
        put = {field: ours[field] for field in ("key", "value", "lease") if field in ours}
        version = int(theirs["mod_revision"])
        try:
            done, answer = await self._swap(put["key"], version, {"request_put": put})
        except LeaseEndedError:
            done, answer = await self._swap(put["key"], version, {"request_delete_range": {"key": put["key"]}})
            if done:
                return None
        if done:
            return {**ours, "mod_revision": answer["header"]["revision"]}
        return _only(answer["responses"][0]["response_range"])

    def _open(self, kv: dict[str, Any]) -> bytes | None:
        """The value of a key; None if it is not sealed as ours are, which the log says once for each key."""
        value, name = b64decode(kv.get("value", "")), _name(kv)
        opened = value if self._seal is None else self._seal.open(name, value)
        if opened is None and name not in self._overwritten and len(self._overwritten) < _MOST_NAMED:
            self._overwritten.add(name)
            logger.error(
                "another client of etcd wrote to %r, without the key of this job; what it wrote is ignored. Give each user "
                "of etcd keys of its own, and only this server's user a right to write to /eep/",
                name,
            )
        return opened

    def _key(self, key: str) -> str:
        return _b64((self._prefix + key).encode())

    def _short(self, kv: dict[str, Any]) -> str:
        return _name(kv)[len(self._prefix) :]


def _name(kv: dict[str, Any]) -> str:
    """The whole name of a key. Others may make keys with names that are no text."""
    return b64decode(kv["key"]).decode(errors="backslashreplace")


def _only(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The one key in an answer, if it is there."""
    kvs = answer.get("kvs", [])
    return kvs[0] if kvs else None


def _b64(raw: bytes) -> str:
    return b64encode(raw).decode()


def _after(prefix: str) -> str:
    """The end of the range of all keys that start with ``prefix``."""
    raw = bytearray(prefix.encode())
    raw[-1] += 1
    return _b64(bytes(raw))
