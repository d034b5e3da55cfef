"""In a scheduler: what this rank serves, and requests that go on elsewhere.

The front end sends no requests to a rank that serves experts only. Such a rank takes part in every step with an empty batch,
as one does that happens to have no requests. What changes here is its memory: when its last request is gone it gives up its
KV cache, where that can be, and it has the cache again before it gets a request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import Any

from eep import faults
from eep.control.launch.processes import RANK
from sglang_patches import hooks
from sglang_patches.addressed_life import MOVED_AWAY, ROLE
from sglang_patches.rank.kv import cache_room

logger = logging.getLogger(__name__)


def register() -> None:
    hooks.hook("managers.scheduler.Scheduler.process_input_requests", _before_requests, "before")


class RankRole:
    """``has_cache``: whether this rank has its KV cache, as far as its role is concerned."""

    def __init__(self) -> None:
        self.experts_only = False
        self.has_cache = True

    def hear(self, role: str) -> None:
        """The front end says so, perhaps not for the first time."""
        experts_only = role == "experts"
        if experts_only is self.experts_only:
            return
        faults.at("role.told")
        self.experts_only = experts_only
        if not experts_only and not self.has_cache:
            self._change()
        logger.warning("this rank serves %s from now on", "experts only" if experts_only else "requests and experts")

    def look(self, scheduler: Any) -> None:
        """In every round of SGLang's loop. What a request has in the cache it keeps, and it may need more."""
        if self.experts_only and self.has_cache and next(served_ids(scheduler), None) is None:
            self._change()

    def _change(self) -> None:
        cache_room.leave_to_experts(self.experts_only)
        self.has_cache = not self.experts_only
        faults.at("role.changed")


def served_ids(scheduler: Any) -> Iterator[str]:
    """The wire ids of the requests that a scheduler has, some of them twice."""
    for batch in (scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None)):
        yield from (request.rid for request in (batch.reqs if batch is not None else ()))
    yield from (request.rid for request in scheduler.waiting_queue)
    yield from (request.rid for request in getattr(scheduler.grammar_manager, "grammar_queue", ()))
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req.rid


def take_orders(messages: list[Any], rank: int) -> tuple[str | None, list[str]]:
    """Take the orders out of what came: the role of this rank, if one is among them, and the wire ids of requests that go on
    elsewhere."""
    role, moved, kept = None, [], []
    for message in messages:
        text = getattr(message, "abort_message", None) or ""
        if text == MOVED_AWAY:
            moved.append(message.rid)
        elif text.startswith(ROLE):
            role = text.removeprefix(ROLE) if message.rid == str(rank) else role
        else:
            kept.append(message)
    messages[:] = kept
    return role, moved


def stoppable(moved: Collection[str], served: Collection[str]) -> list[str]:
    """Which of the requests that go on elsewhere this rank has and can stop. SGLang stops all whose id begins alike: where
    another one has such an id, the rank goes on with both, and the front end drops what comes of the first."""
    others = [wire for wire in served if wire not in moved]
    return [wire for wire in moved if wire in served and not any(other.startswith(wire) for other in others)]


_role = RankRole()


def _before_requests(scheduler: Any, messages: list[Any] | None, *_: Any, **__: Any) -> None:
    if messages:
        role, moved = take_orders(messages, int(os.environ[RANK]))
        if moved:
            _stop(scheduler, messages, moved)
        if role is not None:
            _role.hear(role)
    elif _role.experts_only:
        _role.look(scheduler)


def _stop(scheduler: Any, messages: list[Any], moved: list[str]) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    came = (each.rid for message in messages for each in _requests_in(message))
    stopped = stoppable(set(moved), {*served_ids(scheduler), *came})
    messages.extend(AbortReq(rid=wire) for wire in stopped)  # SGLang begins requests before it obeys aborts


def _requests_in(message: Any) -> list[Any]:
    name = type(message).__name__
    return list(message) if name.startswith("BatchTokenized") else [message] if name.startswith("Tokenized") else []
