"""Whether the hosts of an instance serve the same model, by what each rank has loaded.

Nothing else tells: ranks would exchange tokens, and answers would be wrong. Only experts are compared.
"""

from __future__ import annotations

import logging

from eep.errors import EepError
from eep.experts.held_slots import HeldSlots
from eep.experts.instance_hosts import InstanceHosts
from eep.view import View

logger = logging.getLogger(__name__)


class ModelComparison:
    """``is_of_checkpoint``: whether experts lie here as in the checkpoint. In other forms two copies may differ where no
    kernel looks, so no rank can be sure."""

    def __init__(self, rank: int, hosts: InstanceHosts, slots: HeldSlots, is_of_checkpoint: bool) -> None:
        self._rank, self._hosts, self._slots = rank, hosts, slots
        self._is_of_checkpoint = is_of_checkpoint
        self.has_served = False
        """A rank that has stays: others join it."""

    def check(self, view: View) -> None:
        """Raises :class:`EepError` if other ranks of this view have loaded other experts."""
        unlike = self._slots.unlike
        if not unlike:
            return
        ranks = ", ".join(f"{rank} on {self._hosts.host_of[rank]}" for rank in sorted(unlike))
        why = (
            f"epoch {view.epoch}: rank {self._rank} on {self._hosts.own} has loaded other experts than rank {ranks} "
            f"({sum(unlike.values())} differ); give all hosts the same model, the same versions and the same flags"
        )
        if self.has_served or not self._is_of_checkpoint:
            logger.error("%s", why)
            return
        self._slots.forget()  # the next life loads what is there then
        raise EepError(why)
