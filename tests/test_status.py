"""The quick answer to whether a step can be trusted is the answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eep.peer_table import MAX_RANKS, ControlPage, ranks_of
from eep.status import QuickLook, read_status

words = st.one_of(st.just(0), st.integers(0, 2**MAX_RANKS - 1))


@given(
    status=st.integers(0, 255),
    suspects=words,
    dropped=words,
    corrupt=words,
    revoked=st.integers(0, 4),
    epoch=st.integers(0, 4),
)
def test_in_one_word(status: int, suspects: int, dropped: int, corrupt: int, revoked: int, epoch: int) -> None:
    page = ControlPage(status=status, suspects=suspects, dropped=dropped, corrupt=corrupt, revoked_epoch=revoked)
    look = QuickLook(page)
    assert look.is_ok(epoch) == read_status(page, epoch).ok


@given(statuses=st.lists(st.integers(0, 3), max_size=4), epoch=st.integers(0, 2))
def test_of_several_pages_all_must_be_ok(statuses: list[int], epoch: int) -> None:
    pages = [ControlPage(status=status & 1, revoked_epoch=status >> 1) for status in statuses]
    look = QuickLook(*pages)
    assert look.is_ok(epoch) == all(read_status(page, epoch).ok for page in pages)


word_of_a_page = st.sampled_from(("status", "suspects", "dropped", "corrupt", "revoked_epoch"))


@given(changes=st.lists(st.tuples(st.integers(0, 1), word_of_a_page, st.integers(0, 3), st.integers(0, 3))))
def test_whatever_changes_is_seen(changes: list[tuple[int, str, int, int]]) -> None:
    pages = (ControlPage(), ControlPage())
    look = QuickLook(*pages)
    for changed, name, value, epoch in changes:
        setattr(pages[changed], name, value)
        assert look.is_ok(epoch) == all(read_status(page, epoch).ok for page in pages)


@given(ranks=st.sets(st.integers(0, MAX_RANKS - 1)))
def test_ranks_of_a_mask(ranks: set[int]) -> None:
    assert ranks_of(sum(1 << rank for rank in ranks)) == tuple(sorted(ranks))
