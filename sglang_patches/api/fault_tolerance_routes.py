"""The routes of a fault-tolerance API that is proposed for SGLang, on top of EEP's status and operations.

SGLang has no such routes yet, and may get others. A route of its own goes first: then EEP adds none in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Match

from eep.operations.fault_desk import FaultDesk
from eep.operations.fault_instruction import describe_engines, parse_instruction
from eep.operations.instance_standing import InstanceStanding
from eep.operations.operation_request import BadOperation
from eep.operations.operation_runner import OperationRunner
from eep.operations.operation_table import OperationConflict, TooManyOperations
from sglang_patches.api.http_refusal import refusal
from sglang_patches.api.route_shapes import KEYED
from sglang_patches.api.server_status import ServerStatus

PREFIXES = ("/v1/fault_tolerance", "/fault_tolerance")
_TAGS: list[str | Enum] = ["eep"]


def mount(
    app: FastAPI,
    runner: OperationRunner,
    status: ServerStatus,
    admin: Callable[[Any], Any],
    admitted: Callable[[Request], Awaitable[bytes | Response]],
) -> None:
    """``admin`` marks an endpoint as one that needs the admin key. ``admitted``: the body of a request from where changes are
    taken, or why it is refused."""
    desk = FaultDesk(runner)

    async def engines() -> Response:
        try:
            told = await status.host()
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        last = desk.last_ended
        return JSONResponse({**describe_engines(told, last), "last_ft_failures": desk.failures(last)})

    async def apply(request: Request) -> Response:
        body = await admitted(request)
        if isinstance(body, Response):
            return body
        try:
            given = parse_instruction(body)
            heard = desk.hear(given, InstanceStanding.of(await status.host()))
        except OperationConflict as error:
            return refusal(409, str(error))
        except TooManyOperations as error:
            return refusal(429, str(error))
        except BadOperation as error:
            return refusal(400, str(error))
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")
        names = [each.id for each in heard.operations()]
        return JSONResponse({"request_id": heard.request_id, "operations": names}, 202)

    routes: tuple[tuple[str, str, Callable[..., Awaitable[Response]], str], ...] = (
        ("GET", "status", engines, "Each rank as an engine, in a form that is proposed for SGLang"),
        ("POST", "apply", apply, "Take ranks out (scale_down), in a form that is proposed for SGLang"),
    )
    for prefix in PREFIXES:
        for method, name, endpoint, summary in routes:
            if not _is_served(app, method, path := f"{prefix}/{name}"):
                app.add_api_route(
                    path, admin(endpoint), methods=[method], tags=_TAGS, summary=summary, dependencies=KEYED
                )


def _is_served(app: FastAPI, method: str, path: str) -> bool:
    """Whether a route of the application answers already, even if only to refuse the method."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return any(route.matches(dict(scope))[0] is Match.FULL for route in app.router.routes)
