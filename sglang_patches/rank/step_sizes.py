"""How many tokens a rank can have in one step. Decisions only."""

from __future__ import annotations

from typing import Any


def largest_step(schedule: Any) -> int:
    """The most tokens that a rank can have in one step: a chunk of prefill together with every running request."""
    chunk, running = schedule.chunked_prefill_size, schedule.max_running_requests
    if not chunk or chunk < 0:
        raise SystemExit(
            "--ep-backend eep needs chunked prefill, by which it lays out its buffers: set --chunked-prefill-size"
        )
    if not running:
        raise SystemExit(
            "--ep-backend eep lays out its buffers by how many requests may run at once: set --max-running-requests"
        )
    return int(chunk) + int(running)


def largest_decode(decode: Any, running: int) -> int:
    """The most tokens of a rank in a step in which all ranks decode; 0 where SGLang captures no decode steps.

    ``decode`` is what SGLang captures, ``running`` how many requests a rank may run at once.
    """
    graph = largest_graph(decode)
    return max(running, graph) if graph else 0


def largest_graph(decode: Any) -> int:
    """The most rows that a captured decode step has; 0 where SGLang captures none."""
    if str(getattr(decode.backend, "value", decode.backend)) == "disabled":
        return 0
    return max(map(int, decode.bs))


def running_at_once(schedule: Any, parallel: Any) -> int:
    """How many requests a rank may run at once: its share of those of the server."""
    return -(-int(schedule.max_running_requests) // int(parallel.tp_size))
