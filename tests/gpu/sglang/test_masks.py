"""On a GPU, too, a server whose disk is slow serves at once without the experts that only a lost rank had, brings them in
behind, and marks the answers between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS
from tests.gpu.sglang.conftest import A_SPARE_EACH, serving
from tests.sglang.drills import Drilled
from tests.sglang.masked_server import MASKING, POINTS, RANKS, SLOW, TOKENS, Masked

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def masked(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Masked]:
    flags = (*FOUR_RANKS, *A_SPARE_EACH, *MASKING, "--eep-faults", "on")
    with serving(model, tmp_path_factory.mktemp("masked"), {**mps, **SLOW}, *flags) as server:
        yield Masked(Drilled.of(server, RANKS, prompts=4, tokens=TOKENS), long=2000)


def test_masked_at_once_and_whole_when_the_disk_has_delivered(masked: Masked) -> None:
    masked.check_a_loss()


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_it_brings_in_what_is_missing(masked: Masked, point: str) -> None:
    masked.check_a_kill_behind(point)
