"""When a server resigns: when those of its ranks that may still come are too few."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.membership import Policy
from eep.membership.state import LocalRank, RankStatus
from sglang_patches.server import resignation

POLICY = Policy(max_ranks=4, fewest_ranks=3, relaunch_limit=5)
SERVES = LocalRank(RankStatus.READY)
GIVEN_UP = LocalRank(RankStatus.DOWN, failures=6)
TAKEN_OUT = LocalRank(RankStatus.DOWN, keep=False)


def why(*ranks: LocalRank, policy: Policy = POLICY) -> str | None:
    return resignation.why_to_resign(dict(enumerate(ranks)), policy, max(policy.fewest_ranks, 1))


def test_a_server_goes_on_while_enough_ranks_are_left() -> None:
    assert why(SERVES, SERVES, SERVES, GIVEN_UP) is None


@pytest.mark.parametrize("status", [RankStatus.WANTED, RankStatus.STARTING, RankStatus.RESTING, RankStatus.FENCING])
def test_a_rank_that_may_come_back_counts(status: RankStatus) -> None:
    assert why(SERVES, SERVES, LocalRank(status, failures=5), GIVEN_UP) is None


def test_a_server_resigns_when_too_few_are_left() -> None:
    said = why(SERVES, SERVES, GIVEN_UP, GIVEN_UP)
    assert said is not None
    assert said.startswith("ranks 2, 3 failed more than 5 times in a row")
    assert said.endswith("2 may still serve, and it takes 3")


def test_a_rank_that_an_operator_took_out_does_not_come_back() -> None:
    assert why(SERVES, SERVES, GIVEN_UP, TAKEN_OUT) is not None
    assert why(TAKEN_OUT, TAKEN_OUT, TAKEN_OUT, TAKEN_OUT) is None, "no rank failed"


def test_a_server_that_knows_no_least_number_resigns_without_any_rank() -> None:
    unknown = Policy(max_ranks=2, relaunch_limit=5)
    assert why(SERVES, GIVEN_UP, policy=unknown) is None
    assert why(GIVEN_UP, GIVEN_UP, policy=unknown) is not None


def test_a_server_whose_operator_launches_ranks_does_not_resign() -> None:
    assert why(GIVEN_UP, GIVEN_UP, policy=Policy(max_ranks=2, relaunch_limit=0)) is None


def test_the_reason_can_be_read_once_it_is_announced(tmp_path: Path) -> None:
    assert resignation.read(tmp_path) is None
    resignation.announce(tmp_path, "rank 0 failed")
    assert resignation.read(tmp_path) == "rank 0 failed"


def test_a_controller_that_cannot_tell_ends(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        resignation.announce(tmp_path / "gone", "rank 0 failed")
    assert ended.value.code == 1
