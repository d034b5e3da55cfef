"""In a scheduler: what it makes goes to the detokenizer that there is now.

A detokenizer that ends is replaced by one at the same address, and ZeroMQ connects to that by itself. But what a rank sends
just before it notices the end would be lost. So the front end tells every rank when a detokenizer has ended
(:data:`sglang_patches.addressed_life.RENEWED`), and the rank connects anew and stops what it serves. The requests that go on
come after the order: what they make waits at this rank until the next detokenizer listens.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_patches import hooks
from sglang_patches.addressed_life import is_renewal

logger = logging.getLogger(__name__)


def register() -> None:
    hooks.hook("managers.scheduler.Scheduler.process_input_requests", _before_requests, "before")


def _before_requests(scheduler: Any, messages: list[Any] | None, *_: Any, **__: Any) -> None:
    if messages and put_renewal_first(messages):
        logger.info("the detokenizer has ended; this rank stops what it serves, and connects to the next one")
        connect_anew(scheduler.ipc_channels.send_to_detokenizer.socket)


def put_renewal_first(messages: list[Any]) -> bool:
    """Whether the order is among messages that came together. SGLang puts requests before all else, and so it would stop
    those that were sent after the order. Those that were sent before it, and came with it, the front end has revoked."""
    renewals = [message for message in messages if is_renewal(message)]
    if renewals:
        messages[:] = renewals[-1:] + [message for message in messages if not is_renewal(message)]
    return bool(renewals)


def connect_anew(socket: Any) -> None:
    """Drop the connection of a ZeroMQ socket with what was not sent, and make another to the same address."""
    endpoint, linger = socket.last_endpoint, socket.linger
    socket.linger = 0  # otherwise ZeroMQ would still try to send it
    socket.disconnect(endpoint)
    socket.linger = linger
    socket.connect(endpoint)
