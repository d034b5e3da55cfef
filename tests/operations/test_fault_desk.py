"""Instructions become operations, each once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from eep.operations.fault_desk import MOST_KNOWN, FaultDesk
from eep.operations.fault_instruction import parse_instruction
from eep.operations.operation_request import BadOperation
from eep.operations.operation_runner import OperationRunner
from eep.operations.operation_table import MOST_WAITING, OperationConflict, TooManyOperations
from tests.operations.instance import Instance, asks, standing


class Asked:
    """A desk in front of an instance of four ranks, of which two may go."""

    def __init__(self) -> None:
        self.instance = Instance(standing(fewest_ranks=2))
        self.runner = OperationRunner(self.instance, looks_every=0.001)
        self.desk = FaultDesk(self.runner)

    def ask(self, *ranks: int, name: str = "a") -> Any:
        params = {"removed_dp_ranks": list(ranks)} if ranks else {}
        body = {"instruction": "scale_down" if ranks else "retry", "params": params, "request_id": name}
        return self.desk.hear(parse_instruction(json.dumps(body).encode()), self.instance.now)

    async def until_quiet(self) -> None:
        while self.runner.table.unfinished():
            await asyncio.sleep(0)


def run(body: Callable[[Asked], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(body(Asked()), 30)

    asyncio.run(whole())


def test_the_ranks_are_removed_once_however_often_it_is_asked() -> None:
    async def body(asked: Asked) -> None:
        asked.ask(1, 3)
        assert asked.desk.last_ended == ""
        asked.ask(3, 1)
        await asked.until_quiet()
        assert [(order.action, order.rank) for _, order in asked.instance.given] == [("remove", 1), ("remove", 3)]
        assert asked.desk.last_ended == "a"
        asked.ask(1, 3)
        await asked.until_quiet()
        assert len(asked.instance.given) == 2

    run(body)


def test_a_name_is_for_one_instruction() -> None:
    async def body(asked: Asked) -> None:
        asked.ask(1)
        for other in ((2,), ()):
            with pytest.raises(OperationConflict):
                asked.ask(*other)
        assert len(asked.runner.table.unfinished()) == 1
        first, second = asked.ask(name=""), asked.ask(name="")
        assert first.request_id != second.request_id, "without a name it gets one"

    run(body)


def test_too_many_ranks_at_once_leave_all_in() -> None:
    async def body(asked: Asked) -> None:
        with pytest.raises(BadOperation, match="1 ranks would stay, and it takes 2"):
            asked.ask(1, 2, 3)
        for number in range(MOST_WAITING - 1):
            asked.runner.submit(asks_as(number))
        with pytest.raises(TooManyOperations):
            asked.ask(1, 2)
        assert len(asked.runner.table.unfinished()) == MOST_WAITING - 1

    run(body)


def asks_as(number: int) -> Any:
    return msgspec.structs.replace(asks("drain"), id=f"o{number}")


def test_a_removal_that_fails_is_told() -> None:
    async def body(asked: Asked) -> None:
        asked.instance.refuse = "rank 1 must stay"
        asked.ask(1)
        await asked.until_quiet()
        assert asked.desk.failures(asked.desk.last_ended) == ["rank 1 must stay"]
        asked.ask(name="b")
        assert (asked.desk.last_ended, asked.desk.failures("b")) == ("b", [])

    run(body)


def test_what_is_remembered_is_bounded() -> None:
    async def body(asked: Asked) -> None:
        for number in range(MOST_KNOWN + 10):
            asked.ask(name=f"n{number}")
        assert len(asked.desk._known) == MOST_KNOWN

    run(body)
