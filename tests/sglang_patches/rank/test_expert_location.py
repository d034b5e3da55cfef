"""Which slot a rank sends its tokens to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement
from eep.recovery.contract import ContractBroken
from sglang_patches.rank.expert_location import (
    ExpertLocation,
    choose_copies,
    experts_in_slots,
    find_turns,
    initial_placement,
)


@pytest.mark.parametrize(("slots", "max_ranks"), [(4, 4), (8, 4), (16, 4), (5, 6)])
def test_every_rank_finds_every_expert(slots: int, max_ranks: int) -> None:
    placement = initial_placement(3, 16, slots, ranks=4, max_ranks=max_ranks)
    for rank in range(4):
        chosen = choose_copies(placement, rank)
        layer, expert, _ = np.indices(chosen.shape)
        assert (placement.physical_to_logical[layer, chosen] == expert).all()


def test_a_rank_uses_its_own_copies_and_shares_out_the_others() -> None:
    placement = initial_placement(1, 16, 8, ranks=4, max_ranks=4)
    for rank in range(4):
        own = set(placement.physical_to_logical[0, rank * 8 : rank * 8 + 8].tolist())
        chosen = choose_copies(placement, rank)[0]
        assert all((chosen[expert] // 8 == rank).all() for expert in own)


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_copies_get_equal_shares(copies: int) -> None:
    """What all ranks send, each as much as the others, over all turns."""
    table = np.full((1, 6), EMPTY)
    table[0, :copies] = 0
    placement = Placement(table, 1, 1)
    sent = np.stack([choose_copies(placement, rank) for rank in range(6)])
    slots, times = np.unique(sent, return_counts=True)
    assert slots.tolist() == list(range(copies))
    assert len(set(times.tolist())) == 1


def test_the_turn_of_a_token_depends_on_the_token_alone() -> None:
    picks = torch.randint(1, 17, (40, 4))
    turns, order = find_turns(picks), torch.randperm(40)
    assert torch.equal(find_turns(picks[order]), turns[order])
    assert torch.equal(find_turns(picks[:3]), turns[:3])
    assert len(turns.unique()) > 6


def test_all_ranks_start_from_the_same_placement() -> None:
    assert initial_placement(2, 16, 4, 4, 4).digest == initial_placement(2, 16, 4, 4, 4).digest


@pytest.mark.parametrize(("slots", "ranks", "max_ranks"), [(8, 2, 4), (16, 2, 3), (6, 4, 8), (5, 4, 5)])
def test_a_server_starts_with_every_expert_and_grows_without_moving_any(slots: int, ranks: int, max_ranks: int) -> None:
    first, load = initial_placement(3, 16, slots, ranks, max_ranks), np.ones((3, 16))
    for active in range(ranks, max_ranks + 1):
        view = plan_placement(load, first, range(active), slots, [0] * max_ranks)
        assert view.replica_counts.min() >= 1
        assert count_moves(first, view) == 0, (
            "a rank that joins has loaded what it is to hold, and the others keep theirs"
        )


@pytest.mark.parametrize("table", ["physical_to_logical", "logical_to_physical", "replica_counts", "masked", "choice"])
@pytest.mark.parametrize("when", ["before", "with"])
def test_a_table_that_kernels_read_wrongly_is_refused(table: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word changes by itself between two views, or is not written as it should be."""
    placement = initial_placement(2, 16, 6, ranks=4, max_ranks=4)
    location = ExpertLocation(placement, rank=1)
    read = location.choice if table == "choice" else getattr(location.tables, table)

    def spoil() -> None:
        flat = read.view(-1)
        flat[-1] = ~flat[-1] if read.dtype == torch.bool else flat[-1] + 1

    if when == "before":
        spoil()
    else:
        checked = location.check
        calls: list[int] = []

        def check() -> None:
            calls.append(1)
            if len(calls) == 2:
                spoil()
            checked()

        monkeypatch.setattr(location, "check", check)
    with pytest.raises(ContractBroken, match="graph-visible routing"):
        location.publish(placement, placement)


def test_tables_that_have_moved_and_padding_that_goes_somewhere_are_refused() -> None:
    placement = initial_placement(2, 16, 6, ranks=4, max_ranks=4)
    location = ExpertLocation(placement, rank=1)
    location.choice[1, 0, 3] = 2
    with pytest.raises(ContractBroken, match="only padding"):
        location.publish(placement, placement)
    for name, holder in (("choice", location), ("masked", location.tables)):
        location.choice[1, 0, 3] = EMPTY
        kept = getattr(holder, name)
        setattr(holder, name, kept.clone())
        with pytest.raises(ContractBroken, match="moved"):
            location.publish(placement, placement)
        setattr(holder, name, kept)


def test_a_new_placement_is_written_where_the_old_one_was() -> None:
    placement = initial_placement(2, 16, 16, ranks=4, max_ranks=4)
    location = ExpertLocation(placement, rank=3)
    address = location.choice.data_ptr()
    location.publish(placement.on([0, 1]), placement.on([0, 1]))
    assert location.choice.data_ptr() == address
    assert set((location.choice[:, 1:] // 16).unique().tolist()) <= {0, 1}
    assert (location.choice[:, 0] == EMPTY).all(), "what is only padding goes nowhere"
    assert experts_in_slots(location.placement, 3, 0) == [EMPTY] * 16
    assert torch.equal(location.tables.masked, torch.zeros(2, 16, dtype=torch.bool))
