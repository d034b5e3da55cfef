"""What ranks conclude from each other's intents."""

from __future__ import annotations

import pytest

from eep.recovery.intents import Intent, agreed_digest


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
