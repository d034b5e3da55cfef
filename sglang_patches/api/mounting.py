"""Puts EEP's routes on SGLang's HTTP server, and lets in without a key: probes, the page, and the user of its directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_patches import hooks
from sglang_patches.api.callers import opens

_KEYLESS = re.compile(r"/eep/|/eep/ready|/eep/ranks/\d+/(?:live|ready)")
"""Probes know no key, and the page holds nothing: what it shows it asks for, with the key that its user gives it."""

_tokens: set[str] = set()
"""The token that this server has left in its directory."""


def register() -> None:
    hooks.hook("entrypoints.http_server._setup_and_run_http_server", _mount, "before")
    hooks.hook("utils.auth.decide_request_auth", _decide)


def is_keyless(method: str, path: str) -> bool:
    return method in ("GET", "HEAD") and _KEYLESS.fullmatch(path) is not None


def _decide(original: Callable[..., Any], *, method: str, path: str, **named: Any) -> Any:
    if is_keyless(method, path) or _is_own(path, named.get("authorization_header")):
        from sglang.srt.utils.auth import AuthDecision

        return AuthDecision(allowed=True)
    return original(method=method, path=path, **named)


def _is_own(path: str, authorization: str | None) -> bool:
    return path.startswith("/eep/") and any(opens(authorization, each) for each in _tokens)


def _mount(server_args: Any, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    from sglang_patches.api import http_routes, served_api

    api = served_api.serve(server_args, tokenizer_manager)
    _tokens.add(api.token)
    http_routes.mount(app, api)
