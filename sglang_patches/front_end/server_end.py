"""The end of a server, in the process that clients talk to: on SIGTERM, or because the server resigns.

SGLang waits for its requests for as long as they take, and then for its processes. Here both waits have an end: requests that
are not done get status 503, and the process ends whatever the others do. Its children follow it, and the keeper removes the
rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_patches import hooks, options, store_access
from sglang_patches.front_end import finish_reasons, neighbours, tokenizer_hooks
from sglang_patches.front_end.readiness import ReadinessGate
from sglang_patches.server import detokenizer, resignation

logger = logging.getLogger(__name__)

_AT_ONCE = "SGL_FORCE_SHUTDOWN"
_LOOKS_EVERY = 0.1
_ANSWERS_WITHIN = 0.5
"""How long the answers to requests that were ended may take to their clients."""
_LEAVES_WITHIN = 4.0
"""How long the other processes may take to end. Together with the rest it makes less than 10 s."""
_STARTING = "Starting"
"""As SGLang calls it. Its ``/health`` fails as long."""
_TOLD_TO_END = "it was told to (SIGTERM)"


class ServerEnd:
    """Whether, and why, this process ends."""

    why: str | None = None
    resigned: bool = False


_end = ServerEnd()


def register() -> None:
    hooks.hook("managers.tokenizer_manager.TokenizerManager.sigterm_watchdog", _end_in_time)
    hooks.hook("entrypoints.http_server._setup_and_run_http_server", _run_http_server)


def drain_limit() -> float:
    """How many seconds the requests under way have after SIGTERM."""
    if os.environ.get(_AT_ONCE, "").lower() in ("1", "true"):
        return 0.0
    return options.drain_limit()


def _run_http_server(
    original: Callable[..., Any], server_args: Any, tokenizer_manager: Any, *arguments: Any, **named: Any
) -> None:
    from sglang.srt.entrypoints.http_server import app

    if (host := options.required().host) is not None:
        registry = store_access.open_registry(options.required(), Path(os.environ[options.DIRECTORY]))
        if (url := neighbours.own_url(server_args, host.address)) is not None:
            neighbours.announce(registry, host.number, url)
        app.add_middleware(
            neighbours.NeighbourGate,
            has_none=lambda: _has_no_rank(tokenizer_manager),
            others=lambda: neighbours.find_others(registry, host.number),
            answers_within=tokenizer_hooks.wait_limit(),
        )
    app.add_middleware(
        ReadinessGate,
        why_ending=why_ending,
        why_not_ready=lambda: why_not_ready(tokenizer_manager),
        why_unhealthy=lambda: _why_unhealthy(tokenizer_manager),
        why_drains=lambda: _why_drains(tokenizer_manager),
    )
    original(server_args, tokenizer_manager, *arguments, **named)
    if _end.resigned:
        raise SystemExit(1)


def why_ending() -> str | None:
    """Why this server ends; None while it does not."""
    return _end.why


def why_not_ready(manager: Any, ranks: int = 1, unknown: str | None = None) -> str | None:
    """Why a request that came now would wait, or would be refused, or why fewer than ``ranks`` are in; None if not so.
    ``unknown``: the answer while no view has come."""
    if getattr(getattr(manager, "server_status", None), "name", "") == _STARTING:
        return "the server is starting: its first request has not been answered yet"
    front_end = tokenizer_hooks.front_end_of(manager)
    if front_end is None or not front_end.ranks.has_view:
        return unknown  # SGLang says that it starts
    known = front_end.ranks
    idle = () if known.serving else known.experts_only
    return front_end.service.why_not_ready(len(known.live), ranks, time.monotonic(), idle)


def _has_no_rank(manager: Any) -> bool:
    front_end = tokenizer_hooks.front_end_of(manager)
    return front_end is not None and front_end.ranks.has_view and not front_end.ranks.serving


def _why_drains(manager: Any) -> str | None:
    front_end = tokenizer_hooks.front_end_of(manager)
    if front_end is None or not front_end.service.draining:
        return None
    return str(finish_reasons.try_again(finish_reasons.DRAINING)["message"])


def _why_unhealthy(manager: Any) -> str | None:
    front_end = tokenizer_hooks.front_end_of(manager)
    limit = tokenizer_hooks.wait_limit()
    return None if front_end is None else front_end.service.why_unhealthy(limit, time.monotonic())


async def _end_in_time(original: Callable[[Any], Any], manager: Any) -> None:
    """SGLang's own ``sigterm_watchdog`` ends the processes, once there are no requests left."""
    _end.why, _end.resigned = await _wait_for_end(manager, Path(os.environ[options.DIRECTORY]))
    manager.gracefully_exit = True
    loop = asyncio.get_running_loop()
    until = loop.time() + (0.0 if _end.resigned else drain_limit())
    while manager.rid_to_state and loop.time() < until:
        await asyncio.sleep(_LOOKS_EVERY)
    _leave_later()
    front_end = tokenizer_hooks.front_end_of(manager)
    if front_end is not None and (ended := front_end.end_all(f"the server ends: {_end.why}")):
        logger.warning("%d requests were ended with status 503: the server ends", ended)
        await asyncio.sleep(_ANSWERS_WITHIN)
    manager.rid_to_state.clear()  # what is left is a health check
    if (process := detokenizer.current()) is not None:
        process.stop()
    await original(manager)


async def _wait_for_end(manager: Any, directory: Path) -> tuple[str, bool]:
    while not manager.gracefully_exit:
        why = resignation.read(directory)
        if why is not None:
            logger.error("the server ends: %s", why)
            return why, True
        await asyncio.sleep(_LOOKS_EVERY)
    return _TOLD_TO_END, False


def _leave_later() -> None:
    """End this process from a thread if the others keep it waiting: one that is stopped, or hangs."""
    timer = threading.Timer(_LEAVES_WITHIN, _leave)
    timer.daemon = True
    timer.start()


def _leave() -> None:
    logger.error("the other processes did not end within %g s; the server ends without them", _LEAVES_WITHIN)
    os._exit(1)
