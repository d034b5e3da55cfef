"""What the log of a rank says of experts that are masked."""

from __future__ import annotations

import logging

from eep.experts.placement.slot_plan import Placement
from eep.view import View

logger = logging.getLogger(__name__)
_FOR_WANT_OF_SLOTS = (
    "for ranks %s have too few slots: answers differ from those of the whole model until a rank comes back"
)
_BEHIND = (
    "which ranks %s bring in behind their steps: answers differ from those of the whole model until then, and say so"
)


class MaskNotice:
    """One warning for every change of what is masked, and one when nothing is any more."""

    def __init__(self) -> None:
        self._masked = 0

    def say(self, view: View, placement: Placement, *, is_behind: bool) -> None:
        masked = placement.masked
        now = int(masked.sum())
        if now and now != self._masked:
            logger.warning(
                "epoch %d: %d of %d experts are masked, " + (_BEHIND if is_behind else _FOR_WANT_OF_SLOTS),
                view.epoch,
                now,
                masked.size,
                list(view.active),
            )
        elif self._masked and not now:
            logger.warning(
                "epoch %d: no expert is masked any more; answers are those of the whole model again", view.epoch
            )
        self._masked = now
