"""Acts on evidence: looks up the reaction, finds the ranks, has them fenced or replaced, and writes it down."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import ASKED_BEFORE, AskEvidence
from eep.hardware.evidence import BadEvidence, Evidence, ranks_of
from eep.hardware.reaction_table import Reaction, ReactionTable
from eep.operations.operation_request import OperationRequest
from eep.operations.operation_runner import OperationRunner, OrderRefused
from eep.operations.operation_table import OperationConflict

_REPLACED_WITHIN_S = 600.0
_MOST_REMEMBERED = 1024
DeviceNames = Callable[[], Mapping[int, Collection[str]]]


class EvidenceConflict(BadEvidence):
    """The id names other evidence."""


class EvidenceDesk:
    """``devices()``: every rank of this host, and the names of its device. ``runner`` replaces ranks."""

    def __init__(
        self,
        directory: Path,
        table: ReactionTable,
        runner: OperationRunner,
        devices: DeviceNames,
        hosts: Collection[str],
    ) -> None:
        self._directory, self._table, self._runner = directory, table, runner
        self._devices, self._hosts = devices, hosts
        self._heard: OrderedDict[str, tuple[Evidence, dict[str, Any] | None]] = OrderedDict()
        """What was told lately, and what was done about it; None until all of it is."""

    async def hear(self, given: Evidence) -> dict[str, Any]:
        """What is done about it. Raises :class:`BadEvidence` before anything is changed; OSError if the supervisor does not
        answer, OrderRefused, TooManyOperations: tell it again."""
        ranks = ranks_of(given, self._devices(), self._hosts)
        before, done = self._heard.get(given.id, (None, None))
        if before is not None and before != given:
            raise EvidenceConflict(f"evidence {given.id} is another one ({before.text}); choose another id")
        if done is not None:
            return done
        self._heard[given.id] = (given, None)
        while len(self._heard) > _MOST_REMEMBERED:
            self._heard.popitem(last=False)
        reaction = self._table.reaction_to(given.reason, given.severity)
        for rank in ranks:
            asked = AskEvidence(f"{given.id}:{rank}", rank, given.text, reaction is Reaction.FENCE)
            answer = await asyncio.to_thread(ask_supervisor, self._directory, asked)
            if not answer.ok:
                raise OrderRefused(answer.body)
            if answer.body == ASKED_BEFORE and before is None:
                raise EvidenceConflict(f"evidence {given.id} was told before, to another process; choose another id")
        replaced = [self._replace(f"{given.id}:{rank}", rank) for rank in ranks if reaction is Reaction.REPLACE]
        done = {"id": given.id, "reaction": reaction.value, "ranks": ranks, "operations": replaced}
        self._heard[given.id] = (given, done)
        return done

    def _replace(self, name: str, rank: int) -> str:
        for known in self._runner.table.unfinished():
            if (known.request.action, known.request.rank) == ("replace", rank):
                return known.request.id  # a device that says the same every second
        request = OperationRequest(name, "replace", rank, deadline_s=_REPLACED_WITHIN_S)
        try:
            self._runner.submit(request)
        except OperationConflict as error:
            raise OrderRefused(str(error)) from error
        return name
