"""The routes that change an instance: operations by id, and evidence. They only translate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from eep.hardware.evidence import BadEvidence, Evidence, UnknownHardware, parse_evidence
from eep.hardware.evidence_desk import EvidenceConflict
from eep.operations.operation_request import BadOperation, OperationRequest, parse_request
from eep.operations.operation_runner import OrderRefused
from eep.operations.operation_table import Operation, OperationConflict, TooManyOperations
from sglang_patches.api.http_refusal import refusal
from sglang_patches.api.query_fields import BadQuery, number_in
from sglang_patches.api.request_body import read_body
from sglang_patches.api.route_shapes import (
    KEYED,
    OBJECT,
    OPERATION,
    OPERATION_ANSWERS,
    answers,
    body_of,
    path_of,
    query_of,
)
from sglang_patches.api.served_api import ServedApi
from sglang_patches.front_end import server_end

_SHOWN_OPERATIONS = 64
_FIRST_LOOK_S = 0.5
"""How long the answer to a new operation waits: one that is refused says so at once."""
_LONGEST_WAIT_S = 60.0
_LOOKS_EVERY = 0.05
_Endpoint = TypeVar("_Endpoint")


def _shown(operation: Operation) -> JSONResponse:
    return JSONResponse(operation.describe(), 200 if operation.has_ended else 202)


async def _settled(operation: Operation, seconds: float) -> JSONResponse:
    """When it has ended, or after so long. A server that ends keeps nobody waiting."""
    loop = asyncio.get_running_loop()
    until = loop.time() + max(seconds, _FIRST_LOOK_S)
    while not operation.has_ended and loop.time() < until and server_end.why_ending() is None:
        await asyncio.sleep(_LOOKS_EVERY)
    return _shown(operation)


def why_refused(api: ServedApi, request: Request) -> Response | None:
    """Why a change is not taken; None if it is."""
    if (why := api.why_not_trusted(request)) is not None:
        return refusal(403, why)
    if (why := server_end.why_ending()) is not None:
        return refusal(503, f"the server ends: {why}")
    return None


def mount_operations(app: FastAPI, api: ServedApi) -> None:
    admin: Callable[[_Endpoint], _Endpoint] = auth_level(AuthLevel.ADMIN_OPTIONAL)

    @app.post(
        "/eep/apply",
        tags=["eep"],
        summary="Ask for an operation; asking again with its id does nothing twice",
        dependencies=KEYED,
        responses=answers(OPERATION_ANSWERS, 400, 403, 409, 429, 503),
        openapi_extra={
            **body_of(OperationRequest),
            **query_of(wait={"type": "number", "minimum": 0, "maximum": _LONGEST_WAIT_S, "default": 0}),
        },
    )
    @admin
    async def apply(request: Request) -> Response:
        if (refused := why_refused(api, request)) is not None:
            return refused
        try:
            wait = number_in(request.query_params, "wait", 0.0, 0.0, _LONGEST_WAIT_S)
            operation, _ = api.runner.submit(parse_request(await read_body(request)))
        except OperationConflict as error:
            return refusal(409, str(error))
        except TooManyOperations as error:
            return refusal(429, str(error))
        except (BadOperation, BadQuery) as error:
            return refusal(400, str(error))
        return await _settled(operation, wait)

    @app.post(
        "/eep/evidence",
        tags=["eep"],
        summary="Tell of failing hardware: its ranks are fenced, replaced, or it is noted",
        dependencies=KEYED,
        responses=answers({200: ("what is done about it", OBJECT)}, 400, 403, 404, 409, 429, 503),
        openapi_extra=body_of(Evidence),
    )
    @admin
    async def evidence(request: Request) -> Response:
        if (refused := why_refused(api, request)) is not None:
            return refused
        try:
            return JSONResponse(await api.desk.hear(parse_evidence(await read_body(request))))
        except UnknownHardware as error:
            return refusal(404, str(error))
        except (EvidenceConflict, OrderRefused) as error:
            return refusal(409, str(error))
        except (BadEvidence, BadOperation) as error:
            return refusal(400, str(error))
        except TooManyOperations as error:
            return refusal(429, str(error))
        except OSError as error:
            return refusal(503, f"the supervisor does not answer: {error}")

    @app.get(
        "/eep/operations",
        tags=["eep"],
        summary="The newest operations",
        dependencies=KEYED,
        responses=answers({200: ("in order of acceptance", {"type": "array", "items": OPERATION})}),
    )
    @admin
    async def operations() -> Response:
        return JSONResponse([each.describe() for each in api.runner.table.newest(_SHOWN_OPERATIONS)])

    @app.get(
        "/eep/operations/{ident}",
        tags=["eep"],
        summary="One operation: accepted, running, done or failed",
        dependencies=KEYED,
        responses=answers(OPERATION_ANSWERS, 404),
        openapi_extra=path_of(ident={"type": "string"}),
    )
    @admin
    async def operation_of(request: Request) -> Response:
        ident = request.path_params["ident"]
        operation = api.runner.table.get(ident)
        return _unknown(ident) if operation is None else _shown(operation)

    @app.post(
        "/eep/operations/{ident}/cancel",
        tags=["eep"],
        summary="End an operation, and take back what it did",
        dependencies=KEYED,
        responses=answers(OPERATION_ANSWERS, 403, 404, 503),
        openapi_extra=path_of(ident={"type": "string"}),
    )
    @admin
    async def cancel(request: Request) -> Response:
        if (refused := why_refused(api, request)) is not None:
            return refused
        ident = request.path_params["ident"]
        operation = api.runner.cancel(ident)
        return _unknown(ident) if operation is None else await _settled(operation, 0.0)


def _unknown(ident: str) -> Response:
    return refusal(404, f"there is no operation {ident[:64]!r}, or it ended long ago")
