"""How the front end ends a request that no rank ends, in the form that SGLang passes on to clients."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

DIVERGED = (
    "the rank that served this request was lost; another rank began it again, since answers of its kind cannot be continued, "
    "and its new answer differs from what was sent to you already"
)
RANK_LOST = "the rank that served this request was lost, and {why}"
OUTPUT_LOST = "the detokenizer was lost with a part of this answer, and {why}"
FULL = "the server has {open} open requests, and --max-queued-requests allows no more"
DRAINING = "the server drains: it accepts no requests"
HARMFUL = "this request is not served again, since it may be what ends ranks: {why}"


def try_again(why: str) -> dict[str, Any]:
    """For a request without fault: the client may send it again."""
    return _abort(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", f"{why}; try again")


def failed(why: str) -> dict[str, Any]:
    """For a request that would fail a second time too."""
    return _abort(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", why)


def _abort(status: HTTPStatus, kind: str, message: str) -> dict[str, Any]:
    return {"type": "abort", "status_code": status, "err_type": kind, "message": message}
