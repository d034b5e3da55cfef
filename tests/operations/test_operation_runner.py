from __future__ import annotations

import asyncio

import pytest

from eep.operations.operation_request import OperationRequest
from eep.operations.operation_runner import OperationRunner
from eep.operations.operation_table import (
    MOST_ENDED,
    MOST_WAITING,
    Operation,
    OperationConflict,
    OperationTable,
    TooManyOperations,
)
from tests.operations.instance import Instance, asks, standing


def run(instance: Instance, *requests: OperationRequest) -> list[Operation]:
    async def body() -> list[Operation]:
        runner = OperationRunner(instance, looks_every=0.001)
        found = [runner.submit(request)[0] for request in requests]
        while runner.table.unfinished():
            await asyncio.sleep(0.001)
        return found

    return asyncio.run(asyncio.wait_for(body(), 20))


def told(instance: Instance) -> list[str]:
    return [f"{order.action} {order.rank}" for _, order in instance.given]


def test_a_server_grows_and_says_so() -> None:
    instance = Instance()
    (operation,) = run(instance, asks("scale", ranks=6))
    assert (operation.state, operation.reason) == ("done", "6 ranks serve")
    assert told(instance) == ["launch 4", "launch 5"]
    assert [name for name, _ in instance.given] == ["op/0", "op/1"], "each order has a name of its own"


def test_an_operation_that_fails_leaves_the_instance_as_it_was() -> None:
    instance = Instance(broken=(5,))
    (operation,) = run(instance, asks("scale", ranks=6))
    assert (operation.state, operation.retry) == ("failed", False)
    assert "rank 5 failed 3 times" in operation.reason
    assert instance.now.kept == standing().kept
    assert sorted(operation.describe()["undone"]) == ["remove 4", "remove 5"]


def test_an_operation_that_is_refused_changes_nothing() -> None:
    instance = Instance()
    (operation,) = run(instance, asks("scale", ranks=9))
    assert operation.state == "failed"
    assert instance.given == []


def test_an_operation_ends_at_its_deadline_and_is_taken_back() -> None:
    instance = Instance(standing(open_requests=1))
    (operation,) = run(instance, asks("drain", deadline_s=0.05))
    assert (operation.state, operation.retry) == ("failed", True)
    assert "1 requests are open" in operation.reason
    assert not instance.now.draining


def test_an_operation_outlives_a_supervisor_that_does_not_answer_for_a_while() -> None:
    instance = Instance(silent=5)
    (operation,) = run(instance, asks("launch", 4))
    assert operation.state == "done"


def test_an_operation_ends_when_no_supervisor_answers() -> None:
    (operation,) = run(Instance(silent=10**9), asks("launch", 4, deadline_s=0.05))
    assert (operation.state, operation.retry) == ("failed", True)


def test_an_order_that_is_refused_fails_the_operation_with_its_reason() -> None:
    instance = Instance()
    instance.refuse = "rank 2 must stay"
    (operation,) = run(instance, asks("remove", 2))
    assert (operation.state, operation.reason) == ("failed", "rank 2 must stay")


def test_asking_again_with_an_id_does_nothing_twice() -> None:
    instance = Instance()
    first, second = run(instance, asks("kill", 1), asks("kill", 1))
    assert first is second
    assert told(instance) == ["kill 1"]


def test_operations_run_one_after_the_other() -> None:
    instance = Instance()
    first = OperationRequest("first", "scale", ranks=6)
    second = OperationRequest("second", "scale", ranks=5)
    operations = run(instance, first, second)
    assert [operation.state for operation in operations] == ["done", "done"]
    assert told(instance) == ["launch 4", "launch 5", "remove 5"]


def test_an_id_that_names_another_operation_is_refused() -> None:
    table = OperationTable()
    table.submit(asks("remove", 1), 0.0)
    with pytest.raises(OperationConflict, match="op"):
        table.submit(asks("remove", 2), 0.0)


def test_the_table_is_bounded() -> None:
    table = OperationTable()
    for number in range(MOST_WAITING):
        table.submit(OperationRequest(f"w{number}", "drain"), 0.0)
    with pytest.raises(TooManyOperations):
        table.submit(OperationRequest("more", "drain"), 0.0)
    for number in range(2 * MOST_ENDED):
        for operation in table.unfinished():
            operation.state = "done"
        table.submit(OperationRequest(f"e{number}", "drain"), 0.0)
    assert len(table.newest(10**6)) <= MOST_ENDED + MOST_WAITING
    assert table.get("w0") is None
