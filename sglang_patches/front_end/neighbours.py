"""While no rank of this host is in, requests that come here go on to the front end of another host.

Front ends announce themselves in the store of the instance, under its key. A request goes on as it came, once: a front end
that gets it from another serves it itself. What was under way here waits for the ranks of this host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

import msgspec

from eep.experts.registry.directory_registry import Registry
from sglang_patches.front_end.route_guard import Application, Receive, Scope, Send, path_of

logger = logging.getLogger(__name__)

PASSED_ON = frozenset(
    (
        "/generate",
        "/encode",
        "/classify",
        "/invocations",
        "/vertex_generate",
        "/api/chat",
        "/api/generate",
        "/v1/chat/completions",
        "/v1/classify",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/score",
    )
)
"""Routes of requests that any front end can answer."""
MARK = b"x-eep-passed-on"
"""The header of a request that another front end has passed on."""
_OF_ONE_CONNECTION = frozenset((b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", MARK))
_PREFIX = "front-ends/"
_MOST_BYTES = 64 << 20
"""Of a request; one that is larger waits here."""
_CONNECTS_WITHIN = 2.0


class _FrontEndRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


def announce(registry: Registry, host: int, url: str) -> None:
    """Tell the other hosts where the front end of this one is."""
    registry.publish(f"{_PREFIX}{host}", msgspec.json.encode(_FrontEndRecord(url)))


def find_others(registry: Registry, host: int) -> list[str]:
    """Where the front ends of the other hosts are, the next host first."""
    found = {}
    for key, value in registry.scan(_PREFIX).items():
        number = key.removeprefix(_PREFIX)
        if number.isdecimal() and int(number) != host:
            try:
                found[int(number)] = msgspec.json.decode(value, type=_FrontEndRecord).url
            except msgspec.MsgspecError:
                continue
    return [found[number] for number in sorted(found, key=lambda number: (number < host, number))]


def own_url(server_args: Any, address: str) -> str | None:
    """Where the others reach this front end; None if they do not. ``address``: that of this host."""
    if getattr(server_args, "ssl_keyfile", None) or getattr(server_args, "ssl_certfile", None):
        logger.info("this front end speaks TLS: other hosts pass no requests on to it")
        return None
    bound = ip_address("127.0.0.1" if server_args.host == "localhost" else server_args.host)
    if bound.is_loopback and not ip_address(address).is_loopback:
        logger.info(
            "--host %s: other hosts do not reach this front end, and pass no requests on to it", server_args.host
        )
        return None
    named = address if bound.is_unspecified else str(bound)
    return f"http://{f'[{named}]' if ':' in named else named}:{server_args.port}"


class NeighbourGate:
    """An ASGI application before another. ``has_none()``: whether no rank of this host is in. ``others()``: where other front
    ends are. ``answers_within``: how many seconds they may be silent."""

    def __init__(
        self,
        app: Application,
        has_none: Callable[[], bool],
        others: Callable[[], Sequence[str]],
        answers_within: float = 300.0,
    ) -> None:
        self._app, self._has_none, self._others, self._answers_within = app, has_none, others, answers_within

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._passes_on(scope):
            await self._app(scope, receive, send)
            return
        request = await _Request.read(receive)
        if request.is_whole:
            for url in self._others():
                if await self._ask(url, scope, request, receive, send):
                    return
        await self._app(scope, request.again(receive), send)

    def _passes_on(self, scope: Scope) -> bool:
        return (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and path_of(scope) in PASSED_ON
            and self._has_none()
            and MARK not in dict(scope["headers"])
        )

    async def _ask(self, url: str, scope: Scope, request: _Request, receive: Receive, send: Send) -> bool:
        """Whether the front end at ``url`` has taken the request. A client that goes away ends it there, too."""
        answering = asyncio.ensure_future(self._answer(url, scope, request, send))
        leaving = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else True
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, url: str, scope: Scope, request: _Request, send: Send) -> bool:
        import aiohttp

        headers = [(name, value) for name, value in scope["headers"] if name not in _OF_ONE_CONNECTION]
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in (*headers, (MARK, b"1"))]
        patience = aiohttp.ClientTimeout(sock_connect=_CONNECTS_WITHIN, sock_read=self._answers_within)
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        begun = False
        try:
            async with (
                aiohttp.ClientSession(timeout=patience, auto_decompress=False) as session,
                session.post(f"{url}{path_of(scope)}{query}", data=request.body, headers=named) as answer,
            ):
                if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    return False
                logger.info("no rank of this host is in: a request went on to %s", url)
                raw = [(name.lower(), value) for name, value in answer.raw_headers]
                kept = [(name, value) for name, value in raw if name not in _OF_ONE_CONNECTION]
                begun = True
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("the front end at %s did not answer a request that went on to it: %s", url, error)
            if begun:
                raise  # the client has a part of the answer; the connection is cut
            return False


class _Request:
    """The body of a request, as far as it was read."""

    def __init__(self, body: bytes, is_whole: bool) -> None:
        self.body, self.is_whole = body, is_whole

    @classmethod
    async def read(cls, receive: Receive) -> _Request:
        pieces: list[bytes] = []
        size = 0
        while size <= _MOST_BYTES:
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                return cls(b"".join(pieces), False)
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if not message.get("more_body", False):
                return cls(b"".join(pieces), True)
        return cls(b"".join(pieces), False)

    def again(self, receive: Receive) -> Receive:
        """What gives the request to another application from its beginning on."""
        read = [{"type": "http.request", "body": self.body, "more_body": not self.is_whole}]

        async def receive_again() -> Any:
            return read.pop() if read else await receive()

        return receive_again


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
