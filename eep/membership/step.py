"""One host's step: (state, event) -> (state, effects).

Handlers change what the host knows; what follows from it (publish the report, decide as coordinator, take
over) is worked out once, at the end of every step, from the state alone. So it does not matter which event
brought the news, nor how often.
"""

from __future__ import annotations

from eep.membership.effects import Effect
from eep.membership.events import Event
from eep.membership.handlers import HANDLERS
from eep.membership.state import HostState
from eep.membership.turn import Turn


def step(state: HostState, event: Event) -> tuple[HostState, tuple[Effect, ...]]:
    """What the host knows after ``event``, and what it must do."""
    turn = Turn(state)
    HANDLERS[type(event)](turn, event)
    turn.finish()
    return turn.state, tuple(turn.effects)
