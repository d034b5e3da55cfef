"""How long a rank waits for a peer before it suspects the peer."""

from __future__ import annotations

_LEAST_BETWEEN_STEPS_MS = 10_000.0
"""Between two steps a scheduler may do more than within one."""


def between_steps_ms(timeout_ms: float) -> float:
    """How long a rank waits between two steps, if it waits for ``timeout_ms`` within one."""
    return max(timeout_ms, _LEAST_BETWEEN_STEPS_MS)
