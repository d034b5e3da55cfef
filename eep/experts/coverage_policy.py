"""How experts are kept covered: what the operator has asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import WhenShort
from eep.experts.slot_room import SlotRoom


@dataclass(frozen=True, slots=True)
class CoveragePolicy:
    """A repair that takes longer than ``repair_within`` seconds has failed.

    ``counted`` says how often this rank asked for each expert. Where experts must be masked, those asked for least are.
    ``least_copies``: how many copies each expert has, where slots allow, before any has more. With 2, any one rank may go.
    ``mask_after``: a view begins after so many seconds without what has not arrived from a backup or from disk, and brings it
    in behind its steps; None: it waits for all. ``open_slots``: how many slots of a rank are open where these do; 0: all are,
    always. ``room`` has memory for more of them.
    """

    repair_within: float
    when_short: WhenShort = "refuse"
    counted: Callable[[], FloatArray] | None = None
    least_copies: int = 1
    mask_after: float | None = None
    open_slots: int = 0
    room: SlotRoom | None = None
