"""``GET /eep/events``: the event log, as a list or as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from eep.observe.event_log import fields_of
from sglang_patches.api.http_refusal import refusal
from sglang_patches.api.query_fields import BadQuery, flag_in, ident_in
from sglang_patches.api.route_shapes import KEYED, OBJECT, answers, query_of
from sglang_patches.api.served_api import ServedApi

_SETTLES_WITHIN_S = 0.5
_Endpoint = TypeVar("_Endpoint")


def mount_events(app: FastAPI, api: ServedApi) -> None:
    admin: Callable[[_Endpoint], _Endpoint] = auth_level(AuthLevel.ADMIN_OPTIONAL)
    listed = {"type": "array", "items": OBJECT}

    @app.get(
        "/eep/events",
        tags=["eep"],
        summary="The event log as server-sent events; Last-Event-ID goes on after a line",
        dependencies=KEYED,
        responses=answers({200: ("with follow=false the lines; otherwise a stream of them", listed)}, 400, 429),
        openapi_extra=query_of(after={"type": "string", "default": ""}, follow={"type": "boolean", "default": True}),
    )
    @admin
    async def events(request: Request) -> Response:
        try:
            follow = flag_in(request.query_params, "follow", default=True)
            after = ident_in(request.query_params, "after")
        except BadQuery as error:
            return refusal(400, str(error))
        last = request.headers.get("last-event-id", after)
        feed = api.follow()
        if not follow:
            await feed.settle(_SETTLES_WITHIN_S)
            lines = [{"id": ident, **fields_of(line)} for ident, line in feed.after(last)]
            return Response(json.dumps(lines), media_type="application/json")  # of any text, as it stands in the log
        if api.streams.is_full:
            return refusal(429, f"{api.streams.open} streams of events are open already")
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(api.streams.stream(last), media_type="text/event-stream", headers=headers)
