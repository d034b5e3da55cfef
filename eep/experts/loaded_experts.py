"""What a rank has loaded when it begins."""

from __future__ import annotations

from dataclasses import dataclass

from eep.data_plane.memory import Memory
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory
from eep.experts.placement.packing import IntArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.slot_index import SlotIndex


@dataclass(frozen=True, slots=True)
class LoadedExperts:
    """What an incarnation of a rank has loaded: ``memory``, in ``shared``, with the experts that ``placement`` gives it, or
    those that ``held[layer, slot]`` says if an earlier life has left them there. ``index`` is for the next life. ``aside`` is
    memory for experts that move while the rank serves; None: none ever does."""

    rank: int
    incarnation: int
    placement: Placement
    memory: ExpertMemory
    shared: Memory
    checksums: Checksums
    device: str = "cpu"
    held: IntArray | None = None
    index: SlotIndex | None = None
    aside: ExpertMemory | None = None
