"""Sessions whose steps have portions: a rank that dies between two portions of a layer, and peers that repeat the step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.harness import PATIENCE
from tests.control.test_data_plane import check_journals
from tests.recovery import session_rank
from tests.recovery.test_session import Drilled


@pytest.fixture(scope="module")
def portioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    with Drilled(tmp_path_factory.mktemp("portions"), session_rank.in_portions) as instance:
        instance.until_all_commit({})
        yield instance
        check_journals(instance.supervisor)


@pytest.mark.parametrize(
    ("point", "skip"),
    [("dispatch.before_rows", 1), ("dispatch.after_flags", 4), ("combine.before_rows", 2), ("combine.mid_pull", 3)],
)
def test_a_rank_dies_between_two_portions_of_a_layer(portioned: Drilled, point: str, skip: int) -> None:
    before = portioned.until_all_commit({}).incarnations
    portioned.target.arm(1, point, "kill", skip=skip)
    assert portioned.target.wait_until_fired(1, point, PATIENCE), f"never passed: {point}"
    after = portioned.until_all_commit({1: before[1]}).incarnations
    assert after == (before[0], before[1] + 1, *before[2:]), "ranks that waited for each other were lost as well"
    assert portioned.target.armed() == []


def test_survivors_repeat_steps_with_their_portions(portioned: Drilled) -> None:
    """The test above means something only if some rank had a step to run again."""
    assert any(line["repeated"] for line in portioned.lines())


def test_another_rank_dies_when_the_others_are_about_to_repeat_a_step(portioned: Drilled) -> None:
    before = portioned.until_all_commit({}).incarnations
    portioned.target.arm(2, "intents.after", "kill")
    portioned.target.arm(1, "combine.before_rows", "kill", skip=1)
    assert portioned.target.wait_until_fired(1, "combine.before_rows", PATIENCE)
    assert portioned.target.wait_until_fired(2, "intents.after", PATIENCE)
    after = portioned.until_all_commit({1: before[1], 2: before[2]}).incarnations
    assert after == (before[0], before[1] + 1, before[2] + 1, before[3])
    assert portioned.target.armed() == []
