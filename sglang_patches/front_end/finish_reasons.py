"""How a request ends when no rank ends it, in the form in which SGLang tells its clients."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


def try_again(why: str) -> dict[str, Any]:
    """Nothing is wrong with the request."""
    return _abort(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", f"{why}; try again")


def failed(why: str) -> dict[str, Any]:
    """It would end no better a second time."""
    return _abort(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", why)


def _abort(status: HTTPStatus, kind: str, message: str) -> dict[str, Any]:
    return {"type": "abort", "status_code": status, "err_type": kind, "message": message}
