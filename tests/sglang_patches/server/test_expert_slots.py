"""How many expert slots a command line asks for, and how many lost ranks they cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_patches.server import expert_slots, flags, sglang_flags
from tests.sglang_patches.server.arguments import with_model


@pytest.mark.parametrize("configuration", [{"num_experts": 16}, {"text_config": {"n_routed_experts": 16}}])
def test_by_default_the_others_have_room_for_all_experts_when_one_rank_is_lost(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    redundant = flags.parse(with_model(tmp_path, configuration)).redundant_experts
    slots_per_rank, rest = divmod(16 + redundant, 4)
    assert rest == 0
    assert 3 * slots_per_rank >= 16 > 3 * (slots_per_rank - 1), "as many as it takes, and no more"


@pytest.mark.parametrize(
    ("slots_per_rank", "when_short", "said"),
    [
        (4, "refuse", "16 slots, 4 on each of 4 ranks: every rank is needed; while one is lost, all wait"),
        (
            6,
            "refuse",
            "24 slots, 6 on each of 4 ranks: any one rank may be lost, and the others hold every expert;",
        ),
        (
            8,
            "mask",
            "any 2 ranks may be lost, and the others hold every expert; with more lost, those that are left serve",
        ),
        (16, "refuse", "any 3 ranks may be lost, and the last one still holds every expert"),
    ],
)
def test_what_the_slots_are_enough_for_is_stated(slots_per_rank: int, when_short: str, said: str) -> None:
    assert said in expert_slots.describe_capacity(16, slots_per_rank, 4, when_short)


@pytest.mark.parametrize(
    ("changes", "redundant"),
    [({"eep_redundant_experts": 0}, 0), ({"ep_num_redundant_experts": 4}, 4), ({"eep_redundant_experts": 48}, 48)],
)
def test_redundant_experts_as_asked_for(tmp_path: Path, changes: dict[str, Any], redundant: int) -> None:
    assert flags.parse(with_model(tmp_path, {"num_experts": 16}, **changes)).redundant_experts == redundant


def test_slots_that_ranks_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"22 slots, which 4 ranks cannot share evenly; ask for 8 or 4"):
        flags.parse(with_model(tmp_path, {"num_experts": 16}, eep_redundant_experts=6))


def test_ranks_that_may_be_added_change_nothing_for_each_of_the_first(tmp_path: Path) -> None:
    """SGLang is told of all that there may be, and divides by them; each rank has what it has without the others."""
    two = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "chunked_prefill_size": 1000, "max_running_requests": 101}
    shares = []
    for more in ({}, {"eep_max_ranks": 5}):
        known = with_model(tmp_path, {"num_experts": 16}, **two, **more)
        options = flags.parse(known)
        sglang_flags.imply(known, options)
        assert options.ranks == 2
        assert known.tp_size == known.dp_size == known.ep_size == options.max_ranks
        slots = 16 + known.ep_num_redundant_experts
        divided = (slots, known.chunked_prefill_size, known.max_running_requests)
        shares.append([each // options.max_ranks for each in divided])
        assert slots % options.max_ranks == 0
    assert shares == [[16, 500, 50]] * 2


@pytest.mark.parametrize(("redundant", "fewest"), [(0, 4), (8, 3), (48, 1)])
def test_how_many_ranks_it_takes_to_hold_every_expert(tmp_path: Path, redundant: int, fewest: int) -> None:
    known = with_model(tmp_path, {"num_experts": 16}, eep_redundant_experts=redundant, eep_max_ranks=6)
    assert flags.parse(known).fewest_ranks == fewest


def test_a_model_whose_experts_are_not_known_is_for_sglang_to_judge(tmp_path: Path) -> None:
    assert flags.parse(with_model(tmp_path, {"hidden_size": 8}, eep_redundant_experts=3)).redundant_experts == 3
