"""What probes are told.

``/health`` says that the server lives: SGLang answers it, without asking a rank. It fails once nothing could be served for so
long that requests fail. ``/health_generate`` says that the server is ready: at once no while the ranks cannot serve, and
otherwise SGLang has a rank make a token.

A server that ends answers every request with status 503. So does one that drains, if the request is for an answer of the
model: SGLang would begin a stream with status 200 before it hears that the request is refused, and a router tries again only
where the status says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from sglang_patches.front_end.neighbours import PASSED_ON
from sglang_patches.front_end.route_guard import Application, Receive, Scope, Send, path_of, send_error

READINESS = "/health_generate"
LIVENESS = "/health"
UNTIL_THE_END = ("/metrics", "/metrics/")
"""Routes that a server answers while it ends."""
ASKS_THE_MODEL = PASSED_ON | {"/v1/decisions", "/v1/responses", "/v1/systemone"}
"""Routes of requests that ranks answer. A path with a parameter, such as that of a response, asks for what is there."""
_LOOKS_EVERY = 0.1
Reason = Callable[[], str | None]


class ReadinessGate:
    """An ASGI application before another. ``why_ending``, ``why_not_ready``, ``why_unhealthy``, ``why_drains``: the reason,
    or None while there is none."""

    def __init__(
        self,
        app: Application,
        why_ending: Reason,
        why_not_ready: Reason,
        why_unhealthy: Reason = lambda: None,
        why_drains: Reason = lambda: None,
    ) -> None:
        self._app, self._why_ending, self._why_not_ready = app, why_ending, why_not_ready
        self._why_unhealthy, self._why_drains = why_unhealthy, why_drains
        self._asking: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        why = self._refusal(path)
        if why is None and path == READINESS:
            why = await self._probe(scope, receive, send)
        elif why is None:
            await self._app(scope, receive, send)
        if why is not None:
            await send_error(send, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", why)

    async def _probe(self, scope: Scope, receive: Receive, send: Send) -> str | None:
        """Have SGLang answer. If no rank is in before it does, the reason: SGLang would wait 20 s for the rank that it asked.
        It goes on by itself then, and clears up."""
        answered: list[str] = []

        async def send_if_wanted(message: MutableMapping[str, Any]) -> None:
            if not refused:
                answered.append(message["type"])
                await send(message)

        refused: list[str] = []
        asks = asyncio.ensure_future(self._app(scope, receive, send_if_wanted))
        self._asking.add(asks)
        asks.add_done_callback(self._asking.discard)
        while not (await asyncio.wait({asks}, timeout=_LOOKS_EVERY))[0]:
            why = self._refusal(READINESS)
            if why is not None and not answered:
                refused.append(why)
                return why
        await asks
        return None

    def _refusal(self, path: str) -> str | None:
        ending = None if path in UNTIL_THE_END else self._why_ending()
        if ending is not None:
            return f"the server ends: {ending}; try again"
        if path == LIVENESS:
            return self._why_unhealthy()
        if path in ASKS_THE_MODEL:
            return self._why_drains()
        return self._why_not_ready() if path == READINESS else None
