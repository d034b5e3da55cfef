"""Whether a rank is alive, for probes: it is if it has a process that gets on, in or on its way. Pure.

The supervisor says for how long a rank has stood still, from its looks at progress words, and at processes that start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STILL_S = 30.0
"""A rank that stands still for longer is not alive, unless the probe says otherwise."""


@dataclass(frozen=True, slots=True)
class RankLife:
    """``state``: ``in``, or the status of the rank while it is not. ``still_for``: seconds; None if it does not stand
    still."""

    state: str
    has_process: bool
    still_for: float | None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> RankLife:
        """``told``: what the status says of the rank."""
        return cls("in" if told["in"] else told["status"], told["pid"] is not None, told["still_for"])

    def is_alive(self, still_s: float) -> bool:
        return self.has_process and (self.still_for is None or self.still_for <= still_s)
