"""How EEP's routes refuse a request."""

from __future__ import annotations

from fastapi.responses import JSONResponse

_PASSES = (429, 503)
_RETRY_AFTER_S = 1


def refusal(status: int, why: str) -> JSONResponse:
    """In the form of SGLang's errors, and whether asking the same again may help."""
    passes = status in _PASSES
    error = {"message": why, "type": "EepError", "param": None, "code": status, "retry": passes}
    return JSONResponse({"error": error}, status, {"Retry-After": str(_RETRY_AFTER_S)} if passes else None)
