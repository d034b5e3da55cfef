from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from eep.operations.next_order import Order
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
from tests.operations.instance import Instance, asks, standing, with_rank

_Played = TypeVar("_Played")


def runner_of(instance: Instance, taken_back_within: float = 20.0) -> OperationRunner:
    return OperationRunner(instance, looks_every=0.001, taken_back_within=taken_back_within)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def play(body: Callable[[], Awaitable[_Played]]) -> _Played:
    async def bounded() -> _Played:
        async with asyncio.timeout(20):
            return await body()

    return asyncio.run(bounded())


def run(instance: Instance, *requests: OperationRequest, taken_back_within: float = 20.0) -> list[Operation]:
    async def body() -> list[Operation]:
        runner = runner_of(instance, taken_back_within)
        found = [runner.submit(request)[0] for request in requests]
        await until(lambda: not runner.table.unfinished())
        return found

    return play(body)


def named(ident: str, action: str, **fields: Any) -> OperationRequest:
    return OperationRequest(ident, action, **fields)  # type: ignore[arg-type]


def told(instance: Instance) -> list[str]:
    return [f"{order.action} {order.rank}" for _, order in instance.given]


def test_a_server_grows_and_says_so() -> None:
    instance = Instance()
    (operation,) = run(instance, asks("scale", ranks=6))
    assert (operation.state, operation.reason) == ("done", "6 ranks serve")
    assert told(instance) == ["launch 4", "launch 5"]
    assert [name for name, _ in instance.given] == ["op/launch/4/0", "op/launch/5/0"], (
        "each order has a name of its own"
    )


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
    table.submit(OperationRequest("last", "undrain"), 0.0)
    for number in range(2 * MOST_ENDED):
        for operation in table.unfinished():
            operation.state = "done"
        table.submit(OperationRequest(f"e{number}", "drain"), 0.0)
    assert len(table.newest(10**6)) <= MOST_ENDED + MOST_WAITING
    assert table.get("w0") is None


@pytest.mark.parametrize(
    "request_", [named("now", "drain"), named("now", "undrain"), named("now", "role", rank=1, role="experts")]
)
def test_what_the_front_end_does_waits_for_no_rank(request_: OperationRequest) -> None:
    instance = Instance()
    instance.slow = (3,)

    async def body() -> None:
        runner = runner_of(instance)
        scale, _ = runner.submit(named("scale", "scale", ranks=3))
        await until(lambda: instance.given)
        operation, _ = runner.submit(request_)
        await until(lambda: operation.has_ended)
        assert (operation.state, scale.state) == ("done", "running")
        instance.settle(3)
        await until(lambda: scale.has_ended)
        assert scale.state == "done"

    play(body)


def test_an_operation_that_waits_says_for_which_and_ends_at_its_deadline() -> None:
    instance = Instance()
    instance.slow = (3,)

    async def body() -> None:
        runner = runner_of(instance)
        runner.submit(named("first", "scale", ranks=3))
        second, _ = runner.submit(named("second", "scale", ranks=5, deadline_s=0.05))
        await until(lambda: second.has_ended)
        assert (second.state, second.retry, second.orders) == ("failed", True, [])
        assert second.reason == "not done within 0.05 s: it waits for operation first (scale)"

    play(body)


def test_an_undrain_ends_the_drain_that_runs() -> None:
    instance = Instance(standing(open_requests=1))

    async def body() -> None:
        runner = runner_of(instance)
        drain, _ = runner.submit(named("d", "drain"))
        await until(lambda: instance.now.draining)
        undrain, _ = runner.submit(named("u", "undrain"))
        await until(lambda: drain.has_ended and undrain.has_ended)
        assert (undrain.state, instance.now.draining) == ("done", False)
        assert (drain.state, drain.reason) == ("failed", "operation u (undrain) took its place")

    play(body)


def test_a_drain_that_was_replaced_does_not_end_the_next_one() -> None:
    instance = Instance(standing(open_requests=1))

    async def body() -> None:
        runner = runner_of(instance)
        first, _ = runner.submit(named("d1", "drain"))
        await until(lambda: instance.now.draining)
        runner.submit(named("u", "undrain"))
        second, _ = runner.submit(named("d2", "drain"))
        await until(lambda: first.has_ended and instance.now.draining)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (instance.now.draining, second.state) == (True, "running")

    play(body)


def test_of_two_drains_the_one_that_fails_leaves_the_other_and_the_last_takes_both_back() -> None:
    instance = Instance(standing(open_requests=1))

    async def body() -> None:
        runner = runner_of(instance)
        first, _ = runner.submit(named("d1", "drain"))
        await until(lambda: instance.now.draining)
        second, _ = runner.submit(named("d2", "drain"))
        await until(lambda: second.orders)
        runner.cancel("d1")
        await until(lambda: first.has_ended)
        assert (instance.now.draining, second.state) == (True, "running")
        runner.cancel("d2")
        await until(lambda: second.has_ended)
        assert not instance.now.draining

    play(body)


def test_two_operations_do_not_take_the_last_two_ranks_that_serve_requests() -> None:
    now = standing()
    for rank in (2, 3):
        now = with_rank(now, rank, role="experts")
    instance = Instance(now)
    operations = run(instance, *(named(f"r{rank}", "role", rank=rank, role="experts") for rank in (0, 1)))
    assert sorted(operation.state for operation in operations) == ["done", "failed"]
    assert sorted(rank.role for rank in instance.now.ranks.values() if rank.is_in) == ["both"] + 3 * ["experts"]


def test_an_operation_that_waits_is_cancelled_and_one_that_runs_is_taken_back() -> None:
    instance = Instance(broken=())
    instance.slow = (3,)

    async def body() -> None:
        runner = runner_of(instance)
        first, _ = runner.submit(named("first", "scale", ranks=3))
        second, _ = runner.submit(named("second", "scale", ranks=5))
        await until(lambda: instance.given)
        assert runner.cancel("second") is second
        await until(lambda: second.has_ended)
        assert (second.state, second.reason, second.retry) == ("failed", "it was cancelled", True)
        runner.cancel("first")
        await until(lambda: first.reason.startswith("it is taken back"))
        assert told(instance) == ["remove 3"], "a rank that leaves is not launched before it is out"
        assert first.state == "running"
        instance.settle(3)
        await until(lambda: first.has_ended)
        assert (first.state, told(instance)) == ("failed", ["remove 3", "launch 3"])
        assert instance.now.kept == standing().kept
        assert runner.cancel("first") is first
        assert runner.cancel("none") is None

    play(body)


def test_an_operation_has_not_failed_before_what_it_did_is_taken_back() -> None:
    instance = Instance(broken=(5,))
    instance.slow = (4,)

    async def body() -> None:
        runner = runner_of(instance)
        operation, _ = runner.submit(asks("scale", ranks=6))
        await until(lambda: Order("remove", 4) in operation.undone)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert operation.state == "running"
        instance.settle(4)
        await until(lambda: operation.has_ended)
        assert operation.state == "failed"

    play(body)


def test_what_cannot_be_taken_back_is_named_in_the_reason() -> None:
    class Stubborn(Instance):
        async def give(self, order: Order, name: str) -> bool:
            if order.action == "remove":
                self.refuse = "rank 4 must stay"
            return await super().give(order, name)

    (operation,) = run(Stubborn(broken=(5,)), asks("scale", ranks=6))
    assert "rank 5 failed 3 times" in operation.reason
    assert "not taken back yet: remove 4: rank 4 must stay; remove 5: rank 4 must stay" in operation.reason
    slow = Instance(broken=(5,))
    slow.slow = (4,)
    (operation,) = run(slow, asks("scale", ranks=6), taken_back_within=0.05)
    assert operation.reason.endswith("not taken back yet: remove 4: rank 4 is leaving")


def test_an_order_that_takes_something_back_is_given_until_it_arrives() -> None:
    class Lossy(Instance):
        async def give(self, order: Order, name: str) -> bool:
            if order.action == "remove" and not self.tried:
                self.tried, self.lost_orders = True, 3
            return await super().give(order, name)

        tried = False

    instance = Lossy(broken=(5,))
    (operation,) = run(instance, asks("scale", ranks=6))
    assert operation.state == "failed"
    assert instance.now.kept == standing().kept


def test_an_error_of_ours_is_taken_back_too() -> None:
    class Faulty(Instance):
        async def give(self, order: Order, name: str) -> bool:
            if order == Order("launch", 5):
                raise KeyError("ranks")
            return await super().give(order, name)

    instance = Faulty()
    (operation,) = run(instance, asks("scale", ranks=6))
    assert (operation.state, operation.reason) == ("failed", "KeyError: 'ranks'")
    assert instance.now.kept == standing().kept


def test_what_others_did_meanwhile_is_not_taken_back() -> None:
    instance = Instance()
    instance.slow = (3,)

    async def body() -> None:
        runner = runner_of(instance)
        operation, _ = runner.submit(asks("remove", 3))
        await until(lambda: instance.given)
        instance.settle(0)  # it was given up
        instance.now = with_rank(instance.now, 0, wanted=False)
        runner.cancel("op")
        instance.settle(3)
        await until(lambda: operation.has_ended)
        assert told(instance) == ["remove 3", "launch 3"]

    play(body)


@pytest.mark.parametrize("request_", [asks("kill", 1), asks("replace", 1)])
def test_an_operation_of_another_runner_is_not_done_twice_and_says_so(request_: OperationRequest) -> None:
    instance = Instance()
    run(instance, request_)
    before = list(instance.given)
    (operation,) = run(instance, request_)
    assert (operation.state, operation.retry) == ("failed", True)
    assert operation.reason == "an operation op was carried out before, and nothing is done twice; choose another id"
    assert instance.given == before


def test_an_order_whose_answer_was_lost_is_not_taken_for_that_of_another() -> None:
    class Forgetful(Instance):
        async def give(self, order: Order, name: str) -> bool:
            is_new = await super().give(order, name)
            if is_new:
                raise ConnectionError("the answer is lost")
            return is_new

    (operation,) = run(Forgetful(), asks("launch", 4))
    assert operation.state == "done"


def test_the_deadline_is_no_part_of_what_an_operation_is() -> None:
    table = OperationTable()
    first, _ = table.submit(asks("scale", ranks=6, deadline_s=600), 0.0)
    assert table.submit(asks("scale", ranks=6, deadline_s=60), 0.0) == (first, False)
    assert first.describe()["deadline_s"] == 600
    with pytest.raises(OperationConflict, match="scale, ranks 6"):
        table.submit(asks("scale", ranks=5), 0.0)


def test_an_id_may_be_used_again_when_its_operation_is_forgotten() -> None:
    instance = Instance()
    many = [named(f"n{number}", "undrain") for number in range(MOST_ENDED + 2)]

    async def body() -> None:
        runner = runner_of(instance)
        for request in many:
            operation, _ = runner.submit(request)
            await until(lambda operation=operation: operation.has_ended)
        assert runner.table.get("n0") is None
        again, is_new = runner.submit(named("n0", "kill", rank=1))
        assert is_new
        await until(lambda: again.has_ended)
        assert again.state == "done"

    play(body)
