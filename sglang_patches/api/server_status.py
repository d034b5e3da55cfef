"""What ``GET /eep/status`` says: what the supervisor knows, and what only the front end does.

Many may ask at once. The supervisor is asked once at a time, and an answer serves all who ask within a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eep.control.private_directory import PrivateDirectory
from eep.operations.held_experts import HeldExperts, read_held
from eep.operations.host_status import read_status

FRESH_S = 0.1
EXPERTS_FRESH_S = 1.0


class SharedAnswer:
    """The answer of a function that takes time, for all who ask within ``fresh_s`` seconds."""

    def __init__(self, ask: Callable[[], Any], fresh_s: float) -> None:
        self._ask, self._fresh_s = ask, fresh_s
        self._asked: asyncio.Future[Any] | None = None
        self._answered_at = -1e9

    async def get(self) -> Any:
        """Raises what the function raises."""
        if self._asked is None or (self._asked.done() and time.monotonic() - self._answered_at > self._fresh_s):
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._ask))
            self._asked.add_done_callback(self._answered)
        return await asyncio.shield(self._asked)

    def _answered(self, asked: asyncio.Future[Any]) -> None:
        self._answered_at = time.monotonic()
        asked.exception()  # whoever asked gets it


class ServerStatus:
    """``front_end()``: the front end, or None before its first request. ``loads()``: SGLang's figures of each rank.
    ``masks``: whether ranks serve without the experts that none holds."""

    def __init__(
        self,
        directory: Path,
        front_end: Callable[[], Any],
        loads: Callable[[], list[Any]],
        devices: Callable[[int], str],
        *,
        has_metrics: bool = False,
        masks: bool = False,
    ) -> None:
        self._directory, self._front_end, self._loads, self._devices = directory, front_end, loads, devices
        self._has_metrics, self._masks = has_metrics, masks
        self._host = SharedAnswer(lambda: read_status(directory), FRESH_S)
        self._lives: dict[int, int] = {}
        self._held_in = (-1, "")
        self._held = SharedAnswer(self._read_held, EXPERTS_FRESH_S)

    async def host(self, *, fresh: bool = False) -> dict[str, Any]:
        """What the supervisor says, and what the front end adds to decide about operations. OSError: it does not answer.
        ``fresh``: as it stands now, and not a moment ago."""
        status = await asyncio.to_thread(read_status, self._directory) if fresh else dict(await self._host.get())
        front_end = self._front_end()
        status["open_requests"] = 0 if front_end is None else len(front_end.ledger)
        status["draining"] = front_end is not None and front_end.service.draining
        if front_end is not None:
            requests, role_of = front_end.ledger.loads.requests(), front_end.ranks.role_of
            status["ranks"] = {
                number: {
                    **told,
                    "role": role_of(int(number)),
                    "requests": requests.get(int(number), 0),
                }
                for number, told in status["ranks"].items()
            }
        return status

    async def experts(self) -> HeldExperts:
        status = await self._host.get()
        stands = (status["epoch"], status["phase"])
        if stands != self._held_in:  # what was read is of another view, or of before its repair
            self._lives = {int(rank): told["incarnation"] for rank, told in status["ranks"].items() if told["in"]}
            self._held_in, self._held = stands, SharedAnswer(self._read_held, EXPERTS_FRESH_S)
        found: HeldExperts = await self._held.get()
        return found

    async def whole(self) -> dict[str, Any]:
        """For operators: each rank with what it holds and serves."""
        status, held = await self.host(), await self.experts()
        front_end = self._front_end()
        caches = {load.dp_rank: load for load in self._loads()}
        ranks = {}
        for number, told in status["ranks"].items():
            rank, load = int(number), caches.get(int(number)) if told["in"] else None
            given = told["room_tokens"]  # SGLang takes them for used
            ranks[number] = {
                "requests": 0,
                **told,
                "device": self._devices(rank),
                "kv_tokens": max(0, load.num_used_tokens - given) if load is not None else None,
                "kv_room": max(0, load.max_total_num_tokens - given) if load is not None else None,
                "experts": held.by_rank.get(rank),
            }
        return {
            **status,
            "ranks": ranks,
            "uncovered_experts": held.uncovered if held.copies else None,
            "masked_experts": held.uncovered if held.copies and self._masks else 0,
            "delivered_tokens": 0 if front_end is None else front_end.ledger.delivered_tokens,
            "moved_requests": 0 if front_end is None else front_end.ledger.moved,
            "metrics": self._has_metrics,
            "time": time.time(),
        }

    def _read_held(self) -> HeldExperts:
        return read_held(PrivateDirectory(self._directory).experts, self._lives)
