"""Stands before SGLang's HTTP routes, and answers with status 400 for those that are not served (:mod:`.routes`)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from sglang_patches import hooks
from sglang_patches.front_end import routes
from sglang_patches.front_end.routes import RouteList

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
_POLICY_VIOLATION = 1008


def register() -> None:
    hooks.hook("entrypoints.http_server._setup_and_run_http_server", _guard_routes, "before")


def _guard_routes(*_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(RouteGuard, known=RouteList(os.environ), routed_by=app.router)


class RouteGuard:
    """An ASGI application before another. ``routed_by`` is the router of the other: a path that it does not know is passed
    on, for SGLang to answer."""

    def __init__(self, app: Application, known: RouteList, routed_by: Any) -> None:
        self._app, self._known, self._router = app, known, routed_by

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if why is None:
            await self._app(scope, receive, send)
            return
        logger.warning("%s was refused: %s", scope["path"], why)
        if scope["type"] == "websocket":
            await receive()  # that it wants to connect
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": why[:120]})
            return
        await send_error(send, HTTPStatus.BAD_REQUEST, "BadRequestError", why)

    def _refusal(self, scope: Scope) -> str | None:
        path = path_of(scope)
        if self._known.is_allowed(path):
            return None
        return self._known.why_refused(path) or (routes.unknown(path) if self._is_routed(scope) else None)

    def _is_routed(self, scope: Scope) -> bool:
        from starlette.routing import Match

        return any(route.matches(dict(scope))[0] is not Match.NONE for route in self._router.routes)


async def send_error(send: Send, status: HTTPStatus, kind: str, why: str) -> None:
    """Answer a request with an error in OpenAI's form."""
    body = {"error": {"message": why, "type": kind, "param": None, "code": int(status)}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def path_of(scope: Scope) -> str:
    """The path without the prefix under which the server is reached (``--fastapi-root-path``), as routers see it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below if below.startswith("/") else path
