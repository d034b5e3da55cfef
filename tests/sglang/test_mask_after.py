"""A server whose disk is slow serves at once without the experts that only a lost rank had, and brings them in behind.

Answers before the loss, and those begun when all is there again, are exact and bear no mark. Those between are marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled
from tests.sglang.masked_server import MASKING, POINTS, RANKS, SLOW, TOKENS, Masked

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
ARGUMENTS = (*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", "--enable-metrics", *MASKING)


@pytest.fixture(scope="module")
def masked(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Masked]:
    place = tmp_path_factory.mktemp("masked")
    server = Server(model, ARGUMENTS, place / "log", SLOW, place / "d")
    with server:
        yield Masked(Drilled.of(server, RANKS, prompts=4, tokens=TOKENS))
    assert server.leftovers() == []


def test_masked_at_once_and_whole_when_the_disk_has_delivered(masked: Masked) -> None:
    masked.check_a_loss()


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_it_brings_in_what_is_missing(masked: Masked, point: str) -> None:
    masked.check_a_kill_behind(point)
