"""Has instructions of the proposed fault-tolerance API carried out as operations, each once."""

from __future__ import annotations

import secrets
from collections import OrderedDict

import msgspec

from eep.operations.fault_instruction import FaultInstruction, why_not_possible
from eep.operations.instance_standing import InstanceStanding
from eep.operations.operation_request import BadOperation
from eep.operations.operation_runner import OperationRunner
from eep.operations.operation_table import ENDED, MOST_WAITING, OperationConflict, TooManyOperations

MOST_KNOWN = 256


class FaultDesk:
    """``runner`` carries the operations out."""

    def __init__(self, runner: OperationRunner) -> None:
        self._runner = runner
        self._known: OrderedDict[str, FaultInstruction] = OrderedDict()

    def hear(self, given: FaultInstruction, now: InstanceStanding) -> FaultInstruction:
        """The instruction, with a name. Of one that is known nothing is begun anew. Raises BadOperation, OperationConflict or
        TooManyOperations before anything has changed."""
        given = given if given.request_id else msgspec.structs.replace(given, request_id=secrets.token_hex(8))
        known = self._known.get(given.request_id)
        if known is not None:
            if (known.instruction, known.ranks) != (given.instruction, given.ranks):
                raise OperationConflict(f"request {given.request_id} is another one ({known.instruction})")
            return known
        if (why := why_not_possible(given, now)) is not None:
            raise BadOperation(why)
        operations, table = given.operations(), self._runner.table
        if any(table.get(each.id) is not None for each in operations):
            raise OperationConflict(f"operations of the name of request {given.request_id} are there already")
        if len(table.unfinished()) + len(operations) > MOST_WAITING:
            raise TooManyOperations(f"{MOST_WAITING} operations at most may wait; ask again when some have ended")
        for each in operations:
            self._runner.submit(each)
        self._known[given.request_id] = given
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return given

    @property
    def last_ended(self) -> str:
        """The name of the newest instruction that has ended, whatever came of it; empty if none has."""
        return next((name for name in reversed(self._known) if self._has_ended(self._known[name])), "")

    def failures(self, name: str) -> list[str]:
        """Why operations of an instruction have failed."""
        known = self._known.get(name)
        operations = [] if known is None else [self._runner.table.get(each.id) for each in known.operations()]
        return [each.reason for each in operations if each is not None and each.state == "failed"]

    def _has_ended(self, given: FaultInstruction) -> bool:
        operations = (self._runner.table.get(each.id) for each in given.operations())
        return all(each is None or each.state in ENDED for each in operations)
