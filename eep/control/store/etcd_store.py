"""A store on etcd 3, through its HTTP/JSON gateway: it outlives the loss of any minority of its nodes.

Each call goes to one endpoint, once; after a failure the next call goes to the next endpoint. Reads are
linearizable, which is etcd's default, so a node cut off from the majority does not answer.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NoReturn

import msgspec

from eep.control.store.embedded_store import Listing, StoreError
from eep.control.store.http_client import HttpError, post
from eep.control.store.key_value import Change, LeaseEndedError, StoredValue, Swap


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
        answer_within: float = 2.0,
        listen_for: float = 5.0,
    ) -> None:
        if not endpoints:
            raise ValueError("give at least one etcd endpoint, such as http://127.0.0.1:2379")
        if (user is None) != (password is None):
            raise ValueError("give both a user and a password for etcd, or neither")
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._prefix = f"/eep/{namespace}/"
        self._credentials = {"name": user, "password": password} if user is not None else None
        self._token: str | None = None
        self._tls = tls
        self._answer_within = answer_within
        self._listen_for = listen_for

    async def get(self, key: str) -> StoredValue[bytes] | None:
        answer = await self._call("kv/range", {"key": self._key(key)})
        kvs = answer.get("kvs", [])
        return _entry(kvs[0]) if kvs else None

    async def compare_and_swap(self, key: str, expected: int, value: bytes, lease: int | None = None) -> Swap[bytes]:
        name = self._key(key)
        put = {"key": name, "value": _b64(value), "lease": str(lease or 0)}
        answer = await self._call(
            "kv/txn",
            {
                "compare": [{"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}],
                "success": [{"request_put": put}],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        if answer.get("succeeded"):
            return Swap(True, StoredValue(value, int(answer["header"]["revision"])))
        kvs = answer["responses"][0]["response_range"].get("kvs", [])
        return Swap(False, _entry(kvs[0]) if kvs else None)

    async def watch(self, prefix: str) -> AsyncGenerator[Listing | Change[bytes], None]:
        """Lists again after a while of silence: a node that hangs looks just like a quiet one."""
        span = {"key": self._key(prefix), "range_end": _after(self._prefix + prefix)}
        while True:
            answer = await self._call("kv/range", span)
            version = int(answer["header"]["revision"])
            yield Listing({self._name(kv): _entry(kv) for kv in answer.get("kvs", [])}, version)
            request = {"create_request": {**span, "start_revision": str(version + 1)}}
            endpoint = self._endpoints[0]
            async with aclosing(self._post(endpoint, "watch", request)) as answers:
                while (heard := await self._hear(endpoint, answers)) is not None:
                    for event in heard.get("events", []):
                        kv = event["kv"]
                        value = None if event.get("type") == "DELETE" else b64decode(kv.get("value", ""))
                        yield Change(self._name(kv), value, int(kv["mod_revision"]))

    async def _hear(self, endpoint: str, answers: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
        """The next answer of a watch; None after so long a silence that the caller should list again."""
        try:
            async with asyncio.timeout(self._listen_for):
                result: dict[str, Any] = (await anext(answers)).get("result", {})
        except TimeoutError:
            return None
        except StopAsyncIteration:
            result = {"canceled": True}
        if result.get("canceled"):
            self._leave(endpoint)
            raise StoreError("etcd ended a watch; list again and go on from there")
        return result

    async def grant(self, ttl: float) -> int:
        # etcd counts whole seconds, and a lease must never end early.
        answer = await self._call("lease/grant", {"TTL": str(math.ceil(ttl))})
        return int(answer["ID"])

    async def keep_alive(self, lease: int) -> bool:
        answer = await self._call("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def end_lease(self, lease: int) -> None:
        try:
            await self._call("lease/revoke", {"ID": str(lease)})
        except LeaseEndedError:
            pass  # it has ended, which is what was wanted

    async def clear(self) -> None:
        """Remove every key of this namespace: its job is over."""
        await self._call("kv/deleterange", {"key": self._key(""), "range_end": _after(self._prefix)})

    async def close(self) -> None:
        """Nothing to do: each call has a connection of its own, and ends it."""

    # How etcd is talked to.

    async def _call(self, path: str, body: Any) -> dict[str, Any]:
        endpoint = self._endpoints[0]
        try:
            async with asyncio.timeout(self._answer_within), aclosing(self._post(endpoint, path, body)) as answers:
                async for answer in answers:
                    return answer
        except TimeoutError as error:
            self._leave(endpoint)
            raise StoreError(f"etcd at {endpoint} did not answer {path} within {self._answer_within} s") from error
        raise StoreError(f"etcd at {endpoint} gave no answer to {path}")

    async def _post(self, endpoint: str, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        if self._credentials is not None and self._token is None and path != "auth/authenticate":
            self._token = str((await self._call("auth/authenticate", self._credentials))["token"])
        headers = {"Authorization": self._token} if self._token else {}
        try:
            async with post(f"{endpoint}/v3/{path}", body, headers=headers, tls=self._tls) as (status, lines):
                async for line in lines:
                    answer = msgspec.json.decode(line)
                    if not isinstance(answer, dict) or status != 200 or "error" in answer:
                        self._fail(endpoint, path, line.decode(errors="replace"))
                    yield answer
        except (HttpError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._leave(endpoint)
            raise StoreError(str(error)) from error

    def _fail(self, endpoint: str, path: str, text: str) -> NoReturn:
        if "lease not found" in text:
            raise LeaseEndedError("the lease has ended; register again to get a new one")
        if "auth token" in text:
            self._token = None  # it ran out; the next call fetches another
        self._leave(endpoint)
        raise StoreError(f"etcd at {endpoint} refused {path}: {text[:300]}")

    def _leave(self, endpoint: str) -> None:
        """Send the next call to another endpoint. Calls that fail together on one endpoint leave it once, not once each."""
        if self._endpoints[0] == endpoint:
            self._endpoints.append(self._endpoints.pop(0))

    def _key(self, key: str) -> str:
        return _b64((self._prefix + key).encode())

    def _name(self, kv: dict[str, Any]) -> str:
        return b64decode(kv["key"]).decode()[len(self._prefix) :]


def _b64(raw: bytes) -> str:
    return b64encode(raw).decode()


def _after(prefix: str) -> str:
    """The end of the range of all keys that start with ``prefix``."""
    raw = bytearray(prefix.encode())
    raw[-1] += 1
    return _b64(bytes(raw))


def _entry(kv: dict[str, Any]) -> StoredValue[bytes]:
    return StoredValue(b64decode(kv.get("value", "")), int(kv["mod_revision"]))
