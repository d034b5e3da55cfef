"""One rank's part in moving experts while it serves.

A thread shows what this rank has counted, stages what a proposal gives to it, and on the first rank of the view proposes. The
thread of the steps only says what is staged, and switches when all ranks have said the same (:mod:`.switch_turn`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from eep import faults
from eep.errors import EepError
from eep.experts.balancing.leader import BalancePolicy, Leader, asked_key
from eep.experts.balancing.staging import Staged
from eep.experts.balancing.switch_turn import NOTHING
from eep.experts.coverage import Coverage
from eep.experts.placement.packing import IntArray
from eep.experts.standing import Standing

logger = logging.getLogger(__name__)
_LOOKS_EVERY_S = 1.0
_STAGED_WITHIN_S = 60.0


class Balancer:
    """``counted`` gives ``[layers, experts]``: how often this rank has asked for each expert. Another thread calls it."""

    def __init__(
        self,
        life: tuple[int, int],
        coverage: Coverage,
        counted: Callable[[], IntArray],
        policy: BalancePolicy,
    ) -> None:
        """``life``: the rank and its incarnation."""
        if coverage.log is None or coverage.stage is None:
            raise EepError("this rank has no room to stage experts: give LoadedExperts memory aside")
        self._rank, self._coverage, self._counted, self._policy = life[0], coverage, counted, policy
        self._log, self._stage, self._key = coverage.log, coverage.stage, asked_key(*life)
        self._leader = Leader(coverage.log, coverage.registry, policy, coverage.stage.most)
        self._steps = self._shown = 0
        self._staged: Staged | None = None
        self._is_outdated = False
        """Whether there is a newer proposal than what is staged."""
        self._failed: tuple[Standing, int] | None = None
        """What could not be staged: for which placement, and the number of the attempt."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"eep-balance-{self._rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STAGED_WITHIN_S)

    # ---- the thread of the steps ----

    def stepped(self) -> None:
        """A step has begun."""
        self._steps += 1

    def word(self) -> int:
        """What this rank has staged, as it tells its peers."""
        staged = self._staged
        if staged is None:
            return NOTHING
        if staged.standing is not self._coverage.standing or self._is_outdated:
            self._staged, self._is_outdated = None, False
            return NOTHING
        return staged.word

    def switch(self, word: int) -> None:
        """Between two steps: all ranks have said ``word``."""
        staged = self._staged
        if staged is None or staged.word != word:
            raise EepError("ranks have agreed to switch to a placement that this rank has not staged")
        faults.at("balance.agreed")
        try:
            self._log.commit(staged.standing.next_name, staged.attempt)
        except OSError as error:
            logger.warning("the next view will undo these moves, for they could not be noted: %s", error)
        self._coverage.switch(staged)
        self._staged = None
        logger.info(
            "epoch %d: %d experts moved here; dose %d",
            staged.standing.view.epoch,
            len(staged.transfers),
            staged.record.doses,
        )
        faults.at("balance.switched")

    # ---- the other thread ----

    def _run(self) -> None:
        told = ""
        while not self._stop.wait(_LOOKS_EVERY_S):
            try:
                self.look()
            except (EepError, OSError) as error:
                if str(error) != told:
                    logger.warning("rank %d could not do its part in moving experts: %s", self._rank, error)
                told = str(error)
            except Exception:
                logger.exception("rank %d takes no part in moving experts any more", self._rank)
                return

    def look(self) -> None:
        """Do what there is to do."""
        standing = self._coverage.standing
        if standing is None or self._coverage.is_behind:
            return
        if self._steps - self._shown >= self._policy.every or not self._shown:
            self._shown = max(1, self._steps)
            self._coverage.registry.publish(self._key, self._counted().astype("<i8").tobytes())
        if self._rank == min(standing.view.active):
            self._leader.lead(standing, self._steps)
        self._prepare(standing)

    def _prepare(self, standing: Standing) -> None:
        found = self._log.newest_proposal(standing.next_name)
        if found is None or (standing, found[0]) == self._failed:
            return
        staged = self._staged
        if staged is not None:
            self._is_outdated = staged.standing is not standing or staged.attempt != found[0]
            return
        try:
            self._staged = self._stage.prepare(standing, *found, within=_STAGED_WITHIN_S)
        except EepError:
            self._failed = (standing, found[0])
            raise
