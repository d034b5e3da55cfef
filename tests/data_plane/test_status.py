"""The quick answer to whether a step can be trusted is the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eep.abi.peer_table import MAX_RANKS, ControlPage, RankSet, ranks_of
from eep.data_plane.buffer import Buffer
from eep.data_plane.status import QuickLook, read_status, words_of
from eep.errors import EepError

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
    page = ControlPage(status=status, revoked_epoch=revoked)
    page.suspects, page.dropped, page.corrupt = map(RankSet.of, (suspects, dropped, corrupt))
    look = QuickLook(words_of(page))
    assert look.is_ok(epoch) == read_status(page, epoch).ok


@given(statuses=st.lists(st.integers(0, 3), max_size=4), epoch=st.integers(0, 2))
def test_of_several_pages_all_must_be_ok(statuses: list[int], epoch: int) -> None:
    pages = [ControlPage(status=status & 1, revoked_epoch=status >> 1) for status in statuses]
    look = QuickLook(*map(words_of, pages))
    assert look.is_ok(epoch) == all(read_status(page, epoch).ok for page in pages)


word_of_a_page = st.sampled_from(("status", "suspects", "dropped", "corrupt", "revoked_epoch"))


@given(changes=st.lists(st.tuples(st.integers(0, 1), word_of_a_page, st.integers(0, 3), st.integers(0, 3))))
def test_whatever_changes_is_seen(changes: list[tuple[int, str, int, int]]) -> None:
    pages = (ControlPage(), ControlPage())
    look = QuickLook(*map(words_of, pages))
    for changed, name, value, epoch in changes:
        is_set = isinstance(getattr(pages[changed], name), RankSet)
        setattr(pages[changed], name, RankSet.of(value << MAX_RANKS - 2) if is_set else value)
        assert look.is_ok(epoch) == all(read_status(page, epoch).ok for page in pages)


def test_a_closed_endpoint_is_not_looked_at(tmp_path: Path) -> None:
    """Its page is not mapped any more: to read it would end the process."""
    one, other = (
        Buffer(
            0,
            rendezvous=tmp_path / name,
            max_ranks=2,
            max_tokens=4,
            hidden=64,
            topk=2,
            local_experts=4,
            layout="rank",
            wire="bf16",
        )
        for name in ("one", "other")
    )
    look = QuickLook(one.status_words, other.status_words)
    assert look.is_ok(1)
    other.close()
    with pytest.raises(EepError, match="was closed"):
        look.is_ok(1)
    one.close()


@given(ranks=st.sets(st.integers(0, MAX_RANKS - 1)))
def test_ranks_of_a_mask(ranks: set[int]) -> None:
    assert ranks_of(sum(1 << rank for rank in ranks)) == tuple(sorted(ranks))
