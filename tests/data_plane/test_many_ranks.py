"""Ranks with numbers that one word of 64 bits has no room for. All of so many at once are in ``eep_cuda/test``."""

from __future__ import annotations

import pytest

import eep
from eep.abi.peer_table import MAX_RANKS, RankSet
from tests import moe
from tests.ranks import DIED, Ranks

ALL, VICTIM, SURVIVORS = (3, 64, 100, 129), 129, (3, 64, 100)
SOON_MS, PATIENT_MS = 3000.0, 60_000.0


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_a_rank_beyond_the_first_word_is_lost_and_returns(rendezvous: eep.Rendezvous, layout: str) -> None:
    config = moe.Config(max_ranks=130, max_tokens=4, layout=layout)
    with Ranks(rendezvous, config, timeout_ms=PATIENT_MS) as group:
        group.start(ALL)
        group.connect(ALL)
        group.check_steps(ALL, seed=1, count=3)
        group.all(ALL, "set_timeout", SOON_MS)
        group[VICTIM].call("arm", "dispatch.mid_rows", "kill")
        for rank in ALL:
            group[rank].send("step", 10, ALL)
        for rank in SURVIVORS:
            outputs, status = group[rank].answer()
            group.check_outputs(rank, outputs, 10, ALL)
            assert status.suspects == (VICTIM,)
        assert group[VICTIM].answer() == DIED
        group.all(SURVIVORS, "set_timeout", PATIENT_MS)
        group.all(SURVIVORS, "disconnect", [VICTIM])
        group.check_steps(SURVIVORS, seed=20, count=3)
        group.replace(VICTIM, SURVIVORS)
        assert group[VICTIM].call("hello") == (VICTIM, 1)
        group.check_steps(ALL, seed=30, count=3)


@pytest.mark.parametrize("rank", [0, 63, 64, MAX_RANKS - 1])
def test_a_set_of_ranks_is_a_mask_in_python(rank: int) -> None:
    ranks = RankSet.of(1 << rank | 1)
    assert ranks.words[rank // 64] == 1 << rank % 64 | (rank < 64)
    assert ranks.mask == 1 << rank | 1


def test_a_set_has_room_for_no_more_ranks() -> None:
    with pytest.raises(OverflowError):
        RankSet.of(1 << MAX_RANKS)
