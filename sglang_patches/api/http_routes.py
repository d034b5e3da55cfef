"""EEP's HTTP routes. They only translate: what is asked and answered is decided elsewhere."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from eep.console.api_client import URL_FILE
from eep.control.private_directory import PrivateDirectory
from eep.observe.event_feed import EventFeed, follow_log
from eep.operations.operation_request import MOST_BYTES, BadOperation, OperationRequest, parse_request
from eep.operations.operation_runner import OperationRunner
from eep.operations.operation_table import ENDED, Operation, OperationConflict, TooManyOperations
from sglang_patches.api.callers import why_not_trusted
from sglang_patches.api.event_stream import EventStreams
from sglang_patches.api.rank_devices import device_of
from sglang_patches.api.server_access import ServerAccess
from sglang_patches.api.server_status import ServerStatus
from sglang_patches.front_end import server_end, tokenizer_hooks
from sglang_patches.options import DIRECTORY

_SHOWN_OPERATIONS = 64
_FIRST_LOOK_S = 0.5
"""How long the answer to a new operation waits: one that is refused says so at once."""
_LONGEST_WAIT_S = 60.0
_BODY_WITHIN_S = 10.0
_LOOKS_EVERY = 0.05
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


@dataclass
class ServedApi:
    """What the routes of one server need."""

    directory: Path
    manager: Any
    status: ServerStatus
    runner: OperationRunner
    streams: EventStreams
    has_key: bool
    follows: bool = False

    def follow(self) -> EventFeed:
        """The feed of events, which is filled from the first request for it on."""
        if not self.follows:
            self.follows, loop = True, asyncio.get_running_loop()
            path = PrivateDirectory(self.directory).events
            follow_log(path, lambda line: _told(loop.call_soon_threadsafe(self.streams.feed.add, line)))
        return self.streams.feed


def _told(_: object) -> None:
    return None


def serve(server_args: Any, manager: Any) -> ServedApi:
    directory = Path(os.environ[DIRECTORY])

    def front_end() -> Any:
        return tokenizer_hooks.front_end_of(manager)

    def woken() -> Any:
        manager.auto_create_handle_loop()  # before its first request there is no front end
        return front_end()

    def loads() -> list[Any]:
        reader = getattr(manager, "load_snapshot_reader", None)
        return [] if reader is None else list(reader.read_all())

    _say_where(directory, server_args)
    status = ServerStatus(
        directory,
        front_end,
        loads,
        device_of(server_args),
        socket.gethostname(),
        has_metrics=bool(server_args.enable_metrics),
    )
    return ServedApi(
        directory,
        manager,
        status,
        OperationRunner(ServerAccess(directory, status, woken)),
        EventStreams(EventFeed(secrets.token_hex(4)), lambda: server_end.why_ending() is not None),
        has_key=bool(server_args.api_key or getattr(server_args, "admin_api_key", None)),
    )


def _say_where(directory: Path, server_args: Any) -> None:
    """For ``eep``, which finds the directory by itself."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server_args.host, server_args.host)
    scheme = "https" if getattr(server_args, "ssl_certfile", None) else "http"
    with suppress(OSError):  # where there is no room, it is asked without HTTP
        (directory / URL_FILE).write_text(f"{scheme}://{f'[{host}]' if ':' in host else host}:{server_args.port}\n")


def refusal(status: int, why: str) -> JSONResponse:
    """In the form of SGLang's errors."""
    return JSONResponse({"error": {"message": why, "type": "EepError", "param": None, "code": status}}, status)


def _shown(operation: Operation) -> JSONResponse:
    return JSONResponse(operation.describe(), 200 if operation.state in ENDED else 202)


async def read_body(request: Request) -> bytes:
    """The body of a request; :class:`BadOperation` as soon as it is too long, or takes too long."""
    body = b""
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise BadOperation(f"the request has more than {MOST_BYTES} bytes")
    except TimeoutError:
        raise BadOperation(f"the request was not sent within {_BODY_WITHIN_S:g} s") from None
    return body


def mount(app: FastAPI, api: ServedApi) -> None:
    """Straight on the application: SGLang finds the level of a route's key by looking through the application's routes, and
    in a router that is included it finds none."""
    admin: Callable[[_Endpoint], _Endpoint] = auth_level(AuthLevel.ADMIN_OPTIONAL)
    schema = {"application/json": {"schema": msgspec.json.schema(OperationRequest)["$defs"]["OperationRequest"]}}

    @app.get("/eep/status", tags=_TAGS, summary="The instance, each rank, margin, spares and operations")
    @admin
    async def status() -> Response:
        try:
            whole = await api.status.whole()
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        whole["operations"] = [operation.describe() for operation in api.runner.table.unfinished()]
        return JSONResponse(whole)

    @app.get("/eep/experts", tags=_TAGS, summary="How many ranks hold each expert: copies[layer][expert]")
    @admin
    async def experts() -> Response:
        try:
            held = await api.status.experts()
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        return JSONResponse({"copies": held.copies, "by_rank": held.by_rank})

    @app.post(
        "/eep/apply",
        tags=_TAGS,
        summary="Ask for an operation; asking again with its id does nothing twice",
        openapi_extra={"requestBody": {"required": True, "content": schema}},
    )
    @admin
    async def apply(request: Request, wait: float = Query(0.0, ge=0.0, le=_LONGEST_WAIT_S)) -> Response:
        client = request.client.host if request.client else None
        why = why_not_trusted(client, {k.lower(): v for k, v in request.headers.items()}, has_key=api.has_key)
        if why is not None:
            return refusal(403, why)
        try:
            operation, _ = api.runner.submit(parse_request(await read_body(request)))
        except OperationConflict as error:
            return refusal(409, str(error))
        except TooManyOperations as error:
            return refusal(429, str(error))
        except BadOperation as error:
            return refusal(400, str(error))
        until = asyncio.get_running_loop().time() + max(wait, _FIRST_LOOK_S)
        while operation.state not in ENDED and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOKS_EVERY)
        return _shown(operation)

    @app.get("/eep/operations", tags=_TAGS, summary="The newest operations")
    @admin
    async def operations() -> Response:
        return JSONResponse([each.describe() for each in api.runner.table.newest(_SHOWN_OPERATIONS)])

    @app.get("/eep/operations/{ident}", tags=_TAGS, summary="One operation: accepted, running, done or failed")
    @admin
    async def operation_of(ident: str) -> Response:
        operation = api.runner.table.get(ident)
        if operation is None:
            return refusal(404, f"there is no operation {ident[:64]!r}, or it ended long ago")
        return _shown(operation)

    @app.get(
        "/eep/events", tags=_TAGS, summary="The event log as server-sent events; Last-Event-ID goes on after a line"
    )
    @admin
    async def events(request: Request, after: str = Query("", max_length=64), follow: bool = True) -> Response:
        last = request.headers.get("last-event-id", after)[:64]
        feed = api.follow()
        if not follow:
            await feed.settle(_FIRST_LOOK_S)
            return JSONResponse([{"id": ident, **msgspec.json.decode(line)} for ident, line in feed.after(last)])
        if api.streams.is_full:
            return refusal(429, f"{api.streams.open} streams of events are open already")
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(api.streams.stream(last), media_type="text/event-stream", headers=headers)

    @app.get("/eep/", tags=_TAGS, summary="A page to look at", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(_PAGE.read_text(), headers=_PAGE_HEADERS)

    @app.get("/eep/ready", tags=_TAGS, summary="200 if the server can serve, and so many ranks are in")
    async def ready(ranks: int = Query(1, ge=1, le=65536)) -> Response:
        api.manager.auto_create_handle_loop()  # from its first request on, the front end hears which ranks are in
        why = server_end.why_not_ready(api.manager, ranks, unknown="it is not known yet which ranks are in")
        return refusal(503, why) if why is not None else JSONResponse({"ready": True})

    @app.get("/eep/ranks/{rank}/live", tags=_TAGS, summary="200 if that rank is in and gets on")
    async def live(rank: int) -> Response:
        try:
            told = (await api.status.host())["ranks"].get(str(rank))
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        if told is None:
            return refusal(404, f"there is no rank {rank}")
        if not told["in"] or told["status"] != "ready":
            return refusal(503, f"rank {rank} is {told['status']}")
        return JSONResponse({"rank": rank, "incarnation": told["incarnation"], "still_for": told["still_for"]})
