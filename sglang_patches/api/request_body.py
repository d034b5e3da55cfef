"""The body of a request, which has an end in bytes and in time."""

from __future__ import annotations

import asyncio

from fastapi import Request

from eep.operations.operation_request import MOST_BYTES, BadOperation

_BODY_WITHIN_S = 10.0


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
