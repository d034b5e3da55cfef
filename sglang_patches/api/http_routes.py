"""EEP's HTTP routes. They only translate: what is asked and answered is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from eep.operations.operation_request import BadOperation
from sglang_patches.api import fault_tolerance_routes, probe_routes
from sglang_patches.api.event_routes import mount_events
from sglang_patches.api.http_refusal import refusal
from sglang_patches.api.operation_routes import mount_operations, why_refused
from sglang_patches.api.request_body import read_body
from sglang_patches.api.route_shapes import KEYED, OBJECT, answers
from sglang_patches.api.served_api import ServedApi

_PAGE = Path(__file__).parent / "page.html"
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""The page loads nothing from elsewhere, and no other page may show it in a frame and have its buttons pressed."""
_TAGS: list[str | Enum] = ["eep"]
_Endpoint = TypeVar("_Endpoint")


def page_of(*, keyed: bool) -> str:
    """``keyed``: the server wants a key, so the page asks for nothing before it has one."""
    text = _PAGE.read_text()
    return text.replace('data-keyed="no"', 'data-keyed="yes"', 1) if keyed else text


def mount(app: FastAPI, api: ServedApi) -> None:
    """Straight on the application: SGLang finds the level of a route's key by looking through the application's routes, and
    in a router that is included it finds none."""
    admin: Callable[[_Endpoint], _Endpoint] = auth_level(AuthLevel.ADMIN_OPTIONAL)

    @app.get(
        "/eep/status",
        tags=_TAGS,
        summary="The instance, each rank, margin, spares and operations",
        dependencies=KEYED,
        responses=answers({200: ("as it stands now", OBJECT)}, 503),
    )
    @admin
    async def status() -> Response:
        try:
            whole = await api.status.whole()
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        whole["operations"] = [operation.describe() for operation in api.runner.table.unfinished()]
        return JSONResponse(whole)

    @app.get(
        "/eep/experts",
        tags=_TAGS,
        summary="How many ranks hold each expert: copies[layer][expert]",
        dependencies=KEYED,
        responses=answers({200: ("copies and by_rank", OBJECT)}, 503),
    )
    @admin
    async def experts() -> Response:
        try:
            held = await api.status.experts()
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        return JSONResponse({"copies": held.copies, "by_rank": held.by_rank})

    mount_operations(app, api)
    mount_events(app, api)

    @app.get("/eep/", tags=_TAGS, summary="A page to look at", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(page_of(keyed=api.has_key), headers=_PAGE_HEADERS)

    async def admitted(request: Request) -> bytes | Response:
        if (refused := why_refused(api, request)) is not None:
            return refused
        try:
            return await read_body(request)
        except BadOperation as error:
            return refusal(400, str(error))

    fault_tolerance_routes.mount(app, api.runner, api.status, admin, admitted)
    probe_routes.mount(app, api.manager, api.status)
