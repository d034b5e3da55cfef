"""How etcd is talked to: calls to its HTTP/JSON gateway, as a user with a password if it has users, over TLS if it has
certificates.

Each call goes to one endpoint, once; after a failure the next call goes to the next endpoint, and so do the watches there: a
host that is lost would otherwise keep them waiting.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Literal, NoReturn

import msgspec

from eep.control.store import http_client
from eep.control.store.embedded_store import StoreError
from eep.control.store.http_client import CertificateError, HttpError
from eep.control.store.key_value import LeaseEndedError

Cause = Literal["certificate", "client-certificate", "password", "no-users", "permission"]
_REFUSALS: tuple[tuple[str, Cause, str], ...] = (
    ("authentication failed", "password", "does not accept the user and password"),
    ("user name is empty", "password", "wants a user and password"),
    ("authentication is not enabled", "no-users", "has authentication turned off, and a user and password were given"),
    ("permission denied", "permission", "does not let this user read and write the keys that begin with /eep/"),
)
"""What an answer of etcd holds, what that is about, and what etcd does."""


_CONNECT_SHARE, _TLS_SHARE = 0.15, 0.5
"""Of the time for an answer, to connect without TLS and with it. A node that takes longer to accept a connection is gone, and
others are there."""


class StoreRefusal(StoreError):
    """etcd does not let us in. To ask again is of no use; ``cause`` says what to change."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause: Cause = cause


class EtcdGateway:
    def __init__(
        self,
        endpoints: tuple[str, ...],
        user: str | None,
        password: str | None,
        tls: ssl.SSLContext | None,
        answer_within: float,
    ) -> None:
        if not endpoints:
            raise ValueError("give at least one etcd endpoint, such as http://127.0.0.1:2379")
        if (user is None) != (password is None):
            raise ValueError("give both a user and a password for etcd, or neither")
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._credentials = {"name": user, "password": password} if user is not None else None
        self._token: str | None = None
        self._tls = tls
        self._answer_within = answer_within
        share = _CONNECT_SHARE if tls is None else _TLS_SHARE
        self._connect_within = answer_within * share if len(endpoints) > 1 else None
        self._watches: dict[asyncio.Timeout, str] = {}

    @property
    def endpoint(self) -> str:
        """Where the next call goes."""
        return self._endpoints[0]

    async def call(self, path: str, body: Any) -> dict[str, Any]:
        """The answer. :class:`StoreError` if there is none in time."""
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(self._answer_within), aclosing(self.post(endpoint, path, body)) as answers:
                async for answer in answers:
                    return answer
        except TimeoutError as error:
            self.leave(endpoint)
            raise StoreError(f"etcd at {endpoint} did not answer {path} within {self._answer_within} s") from error
        raise StoreError(f"etcd at {endpoint} gave no answer to {path}")

    async def post(self, endpoint: str, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The answers as they come. Deadlines are the caller's."""
        if self._credentials is not None and self._token is None and path != "auth/authenticate":
            self._token = str((await self.call("auth/authenticate", self._credentials))["token"])
        headers = {"Authorization": self._token} if self._token else {}
        try:
            async with http_client.post(
                f"{endpoint}/v3/{path}", body, headers=headers, tls=self._tls, connect_within=self._connect_within
            ) as (status, lines):
                async for line in lines:
                    answer = msgspec.json.decode(line)
                    if not isinstance(answer, dict) or status != 200 or "error" in answer:
                        self._fail(endpoint, path, line.decode(errors="replace"))
                    yield answer
        except CertificateError as error:
            self.leave(endpoint)
            raise StoreRefusal("client-certificate" if error.is_ours else "certificate", str(error)) from error
        except (HttpError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.leave(endpoint)
            raise StoreError(str(error)) from error

    def _fail(self, endpoint: str, path: str, text: str) -> NoReturn:
        if "lease not found" in text:
            raise LeaseEndedError("the lease has ended; register again to get a new one")
        if "auth token" in text or "auth store is old" in text:
            self._token = None  # it ran out, or users of etcd were changed; the next call fetches another
        self.leave(endpoint)
        for part, cause, does in _REFUSALS:
            if part in text:
                raise StoreRefusal(cause, f"etcd at {endpoint} {does}: {text[:300]}")
        raise StoreError(f"etcd at {endpoint} refused {path}: {text[:300]}")

    @contextmanager
    def listening(self, endpoint: str, patience: asyncio.Timeout) -> Iterator[None]:
        """While a watch waits for this endpoint. Its patience is over when another call leaves the endpoint."""
        self._watches[patience] = endpoint
        try:
            yield
        finally:
            del self._watches[patience]

    def leave(self, endpoint: str) -> None:
        """Send the next call to another endpoint. Calls that fail together on one endpoint leave it once, not once each."""
        if self.endpoint != endpoint or len(self._endpoints) == 1:
            return
        self._endpoints.append(self._endpoints.pop(0))
        for patience, listens_at in self._watches.items():
            if listens_at == endpoint and not patience.expired():
                patience.reschedule(asyncio.get_running_loop().time())
