"""In a scheduler: requests for another life of this rank are dropped, and the front end is told of those that came.

A request that was sent to the life before is served elsewhere by now. One that the front end has revoked, since it heard
nothing of it for long, is served elsewhere too. Both must be dropped before the scheduler begins them.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from eep import faults
from eep.control.launch.processes import INCARNATION
from sglang_patches import addressed_life, hooks
from sglang_patches.addressed_life import RECEIVED, REVOKED
from sglang_patches.rank import warm_up

logger = logging.getLogger(__name__)


def register() -> None:
    hooks.hook("managers.scheduler.Scheduler.process_input_requests", _before_requests, "before")


def _before_requests(scheduler: Any, messages: list[Any] | None, *_: Any, **__: Any) -> None:
    if not messages or warm_up.is_under_way():
        return
    from sglang.srt.managers.io_struct import AbortReq

    received = sort_out(messages, int(os.environ[INCARNATION]))
    for wire in received:
        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=wire, abort_message=RECEIVED))


def sort_out(messages: list[Any], life: int) -> list[str]:
    """Take out of ``messages`` what this life is not to do. Returns the wire ids of the requests that are left."""
    revoked = {message.rid for message in messages if _is_revocation(message)}
    kept, received = [], []
    for message in messages:
        meant = addressed_life.life_of(message)
        if meant is None:
            if not _is_revocation(message):
                kept.append(message)
        elif meant != life or message.rid in revoked:
            logger.info("request %s was for incarnation %d, or is revoked; it runs elsewhere", message.rid, meant)
        elif not faults.loses("request.received"):
            addressed_life.clear(message)
            kept.append(message)
            received.append(message.rid)
    messages[:] = kept
    return received


def _is_revocation(message: Any) -> bool:
    return getattr(message, "abort_message", None) == REVOKED
