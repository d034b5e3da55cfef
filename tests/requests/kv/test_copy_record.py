"""The copies of contexts in ``eep status``."""

from __future__ import annotations

from pathlib import Path

from eep.requests.kv.copy_record import CopyRecord, CopyTeller, read_copies


def test_the_copies_of_the_ranks_that_are_in_are_summed(tmp_path: Path) -> None:
    assert read_copies(tmp_path, {0: 0}) is None
    tellers = [CopyTeller(tmp_path, rank, life=2) for rank in range(3)]
    for rank, teller in enumerate(tellers):
        teller.tell(CopyRecord(100, 10, rank, 3))
    tellers[1].tell(CopyRecord(100, 10, 7, 0))
    expected = {"bytes": 200, "room_tokens": 20, "covered_tokens": 7, "lag_tokens": 3}
    assert read_copies(tmp_path, {0: 2, 1: 2, 2: 3}) == expected, "rank 2 has another life by now"
    tellers[0].close()
    assert read_copies(tmp_path, {0: 2}) is None, "a record goes with its writer"
