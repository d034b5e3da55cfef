"""How long a rank waits for a peer before it suspects the peer.

A peer that prefills a long prompt takes long for each of its layers, and is not dead. On a CPU that may take many seconds,
and it depends on the whole prompt rather than on the part in this step. Before each step the ranks tell each other whether
any of them prefills, so all wait longer in a step in which one does.
"""

from __future__ import annotations

from collections import deque

_LEAST_BETWEEN_STEPS_MS = 10_000.0
"""Between two steps a scheduler may do more than within one."""
_PREFILL_FACTOR = 30
_STEPS = 2
"""A step may have to run again when the next has begun already."""
_FEW_TOKENS = 64
"""A rank computes so many soon, be they of a prompt: a step that decodes has as many."""


def between_steps_ms(timeout_ms: float) -> float:
    """How long a rank waits between two steps, if it waits for ``timeout_ms`` within one."""
    return max(timeout_ms, _LEAST_BETWEEN_STEPS_MS)


class StepPatience:
    """The patience of a rank, which follows the steps. On a GPU no layer takes long, so there it is for the host only.

    It ends at half the time after which a rank counts as stalled: a rank that waits makes no progress.
    """

    def __init__(self, timeout_ms: float, stall_timeout_s: float) -> None:
        self._timeout_ms = timeout_ms
        longest = _PREFILL_FACTOR * timeout_ms
        if stall_timeout_s:
            longest = min(longest, stall_timeout_s * 1000 / 2)
        self._prefill_ms = max(timeout_ms, longest)
        # Peers of a rank that has just joined may run a step again of which it was not told.
        self._prefills = deque([True], maxlen=_STEPS)
        self._long = deque([True], maxlen=_STEPS)

    def begin(self, prefills: bool, tokens: int) -> None:
        """A step begins. ``prefills``: at least one rank prefills in it; ``tokens``: the most that a rank has in it."""
        self._prefills.append(prefills)
        self._long.append(prefills and tokens > _FEW_TOKENS)

    @property
    def for_long_work(self) -> bool:
        """Whether a rank may honestly compute for long before it hears from its peers again."""
        return any(self._long)

    @property
    def within_step_ms(self) -> float:
        return self._prefill_ms if any(self._prefills) else self._timeout_ms

    @property
    def between_steps_ms(self) -> float:
        """A rank may still be at work on the last layers of the step before."""
        return between_steps_ms(self.within_step_ms)
