"""The routes that probes ask, without a key: whether the server is ready, and how each rank is."""

from __future__ import annotations

from enum import Enum
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from eep.operations.rank_liveness import STILL_S, RankLife
from sglang_patches.api.http_refusal import refusal
from sglang_patches.api.query_fields import BadQuery, count_in, number_in
from sglang_patches.api.route_shapes import OBJECT, answers, fields_of_route, path_of, query_of
from sglang_patches.api.server_status import ServerStatus
from sglang_patches.front_end import server_end

_TAGS: list[str | Enum] = ["eep"]
_MOST_RANKS = 65536
_SHORTEST_STILL_S, _LONGEST_STILL_S = 0.001, 86400.0
_RANK = {"type": "integer"}


def mount(app: FastAPI, manager: Any, status: ServerStatus) -> None:
    """``manager``: SGLang's, of the tokenizer."""

    async def look(rank: str) -> tuple[RankLife, dict[str, Any]] | Response:
        try:
            told = (await status.host())["ranks"].get(rank)
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        if told is None:
            return refusal(404, f"there is no rank {rank[:16]}")
        life = RankLife.of(told)
        return life, {
            **{"rank": int(rank), "state": life.state, "incarnation": told["incarnation"], "still_for": life.still_for}
        }

    @app.get(
        "/eep/ready",
        tags=_TAGS,
        summary="200 if the server can serve, and so many ranks are in",
        responses=answers({200: ("it is ready", OBJECT)}, 400, 503),
        openapi_extra=query_of(ranks={"type": "integer", "minimum": 1, "maximum": _MOST_RANKS, "default": 1}),
    )
    async def ready(request: Request) -> Response:
        try:
            ranks = count_in(request.query_params, "ranks", 1, 1, _MOST_RANKS)
        except BadQuery as error:
            return refusal(400, str(error))
        manager.auto_create_handle_loop()  # from its first request on, the front end hears which ranks are in
        why = server_end.why_not_ready(manager, ranks, unknown="it is not known yet which ranks are in")
        return refusal(503, why) if why is not None else JSONResponse({"ready": True})

    @app.get(
        "/eep/ranks/{rank}/live",
        tags=_TAGS,
        summary="200 if that rank has a process that gets on",
        responses=answers({200: ("it is alive", OBJECT)}, 400, 404, 503),
        openapi_extra=fields_of_route(
            path_of(rank=_RANK), query_of(still_s={"type": "number", "maximum": _LONGEST_STILL_S, "default": STILL_S})
        ),
    )
    async def live(request: Request) -> Response:
        rank = request.path_params["rank"]
        try:
            still_s = number_in(request.query_params, "still_s", STILL_S, _SHORTEST_STILL_S, _LONGEST_STILL_S)
        except BadQuery as error:
            return refusal(400, str(error))
        found = await look(rank)
        if isinstance(found, Response):
            return found
        life, told = found
        if not life.has_process:
            return refusal(503, f"rank {rank} is {life.state}: it has no process")
        if not life.is_alive(still_s):
            return refusal(503, f"rank {rank} is {life.state}, and has stood still for {life.still_for:g} s")
        return JSONResponse(told)

    @app.get(
        "/eep/ranks/{rank}/ready",
        tags=_TAGS,
        summary="200 if that rank is in",
        responses=answers({200: ("it is in", OBJECT)}, 404, 503),
        openapi_extra=path_of(rank=_RANK),
    )
    async def rank_ready(request: Request) -> Response:
        rank = request.path_params["rank"]
        found = await look(rank)
        if isinstance(found, Response):
            return found
        life, told = found
        return JSONResponse(told) if life.state == "in" else refusal(503, f"rank {rank} is {life.state}")
