"""On a GPU, too, a server goes on exactly when it loses one, two and three of its four ranks: those that are left give parts
of their caches to expert slots, under the same captured graphs, and have them back later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS
from tests.gpu.sglang.conftest import A_SPARE_EACH, serving
from tests.sglang.drills import Drilled
from tests.sglang.roomy_server import MAKING_ROOM, POINTS, RANKS, Roomy

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def roomy(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roomy]:
    flags = (*FOUR_RANKS, *A_SPARE_EACH, *MAKING_ROOM, "--eep-faults", "on")
    with serving(model, tmp_path_factory.mktemp("roomy"), mps, *flags) as server:
        yield Roomy(Drilled.of(server, RANKS))


def test_one_two_and_three_of_four_ranks_are_lost_and_come_back(roomy: Roomy) -> None:
    roomy.check_that_three_of_four_may_go()


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_it_makes_room_or_gives_it_back(roomy: Roomy, point: str) -> None:
    roomy.check_a_kill(point)
