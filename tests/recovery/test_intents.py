"""What ranks conclude from each other's intents."""

from __future__ import annotations

import pytest

from eep.data_plane.passage import Passage
from eep.recovery.intents import (
    Intent,
    _pack,
    _unpack,
    agreed_digest,
    owed_passage,
    passages_in_order,
)


@pytest.mark.parametrize(
    ("digests", "agreed"),
    [
        ({0: 7, 1: 7, 2: 7}, 7),
        ({0: 8, 1: 7, 2: 7}, 7),
        ({0: 7, 1: 7, 2: 8, 3: 9}, 7),
        ({1: 8, 3: 7}, 8),
        ({3: 7, 1: 8, 2: 8, 0: 7}, 7),
        ({0: 1, 1: 8, 2: 8, 3: 7, 5: 7}, 8),
        ({2: 5}, 5),
    ],
)
def test_the_placement_that_most_ranks_made_counts_and_of_equals_that_of_the_lowest_rank(
    digests: dict[int, int], agreed: int
) -> None:
    assert agreed_digest({rank: Intent(digest, 0, None) for rank, digest in digests.items()}) == agreed


@pytest.mark.parametrize(
    "intent",
    [
        Intent(7, 0, None),
        Intent(2**64 - 1, 2, Passage(0, 1), Passage(1, 1)),
        Intent(1, 1, Passage(1, 300), None),
        Intent(1, 0, None, Passage(0, 2**40)),
    ],
)
def test_peers_hear_what_a_rank_intends(intent: Intent) -> None:
    assert _unpack(_pack(intent)) == intent


def test_ranks_that_repeat_steps_of_different_sizes_take_every_passage_one_after_the_other() -> None:
    """A rank would wait for ever for the round of a portion that its peers do not have."""
    intents = {
        0: Intent(7, 1, Passage(0, 3)),
        1: Intent(7, 1, Passage(1)),
        2: Intent(7, 0, None),
        3: Intent(7, 2, Passage(0, 2)),
        5: Intent(7, 1, Passage(0, 3)),
    }
    assert passages_in_order(intents) == [Passage(0, 2), Passage(0, 3), Passage(1)]
    assert passages_in_order({2: intents[2]}) == []


def test_ranks_that_owe_nothing_take_part_in_all_portions_of_the_step_that_others_owe() -> None:
    intents = {0: Intent(7, 0, None), 1: Intent(7, 0, None, Passage(0, 5)), 2: Intent(7, 1, Passage(0, 5))}
    assert owed_passage(intents) == Passage(0, 5)
    assert owed_passage({0: intents[0], 2: intents[2]}) is None
