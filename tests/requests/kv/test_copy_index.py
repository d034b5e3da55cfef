"""Pages of a copy are found and believed when their writer is gone, whatever it was doing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eep.requests.kv.copy_index import CopiedPages, CopyReader, CopyWriter, bytes_for, pages_in
from eep.requests.kv.copy_layout import PAGE, PageLayout
from eep.requests.kv.kv_journal import fingerprint

PAGE_BYTES, PAGES, KIND = 48, 8, "two layers"


def memory(pages: int = PAGES) -> np.ndarray:
    return np.zeros(bytes_for(pages, PAGE_BYTES), np.uint8)


def taken(reader: CopyReader, found: CopiedPages, first: int, end: int) -> list[list[int]]:
    into = np.zeros((end - first, PAGE_BYTES), np.uint8)
    reader.take(found, first, into)
    return into.tolist()


def pair(shared: np.ndarray, life: int = 3) -> tuple[CopyWriter, CopyReader]:
    return CopyWriter(shared, PAGE_BYTES, KIND, life), CopyReader(shared, PAGE_BYTES, KIND)


def write(writer: CopyWriter, wire: str, *places: tuple[int, int]) -> None:
    """Pages of a request and the places that they get."""
    pages, numbers = (np.array([place[side] for place in places]) for side in (1, 0))
    writer.clear(pages)
    for number, page in places:
        writer.pages[page] = number + 100
    writer.enter(pages, np.array([fingerprint(wire)] * len(places), np.uint64), numbers)


def test_a_survivor_finds_the_pages_of_a_request_in_order() -> None:
    writer, reader = pair(memory())
    write(writer, "a", (0, 5), (2, 1), (1, 7))
    write(writer, "b~1", (0, 0))
    found = reader.find(3, "a")
    assert found is not None
    assert (found.pages.tolist(), found.tokens) == ([5, 7, 1], 3 * PAGE)
    assert taken(reader, found, 1, 3) == [[101] * PAGE_BYTES, [102] * PAGE_BYTES]
    assert reader.find(3, "b") is None
    assert reader.find(2, "a") is None, "of another life"


def test_pages_behind_a_gap_are_of_no_use() -> None:
    writer, reader = pair(memory())
    write(writer, "a", (0, 5), (1, 6), (3, 7))
    found = reader.find(3, "a")
    assert found is not None
    assert found.pages.tolist() == [5, 6]
    writer.clear(np.array([5]))
    assert reader.find(3, "a") is None


def test_the_next_life_begins_with_nothing() -> None:
    shared = memory()
    writer, reader = pair(shared)
    write(writer, "a", (0, 5))
    CopyWriter(shared, PAGE_BYTES, KIND, 4)
    assert reader.find(3, "a") is None
    assert reader.find(4, "a") is None


def test_a_page_that_changes_after_it_was_found_is_not_believed() -> None:
    """The next life has taken the memory over, and copies another request there."""
    shared = memory()
    writer, reader = pair(shared)
    write(writer, "a", (0, 5), (1, 6))
    found = reader.find(3, "a")
    assert found is not None
    write(CopyWriter(shared, PAGE_BYTES, KIND, 4), "c", (3, 6))
    assert taken(reader, found, 0, 1) == [[100] * PAGE_BYTES]
    with pytest.raises(ValueError, match="tokens 16 to 31 are not what was copied"):
        taken(reader, found, 0, 2)


def test_memory_that_is_no_such_copy_has_nothing() -> None:
    shared = memory()
    assert CopyReader(shared, PAGE_BYTES, KIND).find(0, "a") is None
    writer, _ = pair(shared)
    write(writer, "a", (0, 5))
    assert CopyReader(shared, PAGE_BYTES, "three layers").find(3, "a") is None
    assert CopyReader(shared, 2 * PAGE_BYTES, KIND).find(3, "a") is None


@given(st.integers(0, 2), st.integers(0, 31), st.integers(1, 255))
def test_an_entry_of_which_a_byte_is_another_is_not_believed(page: int, at: int, change: int) -> None:
    """Such as one that was half written when its process was killed."""
    shared = memory()
    writer, reader = pair(shared)
    write(writer, "a", (0, 0), (1, 1), (2, 2))
    writer._entries[page : page + 1].view(np.uint8)[at] ^= change
    found = reader.find(3, "a")
    count = 0 if found is None else len(found.pages)
    if found is not None and count > page:
        assert taken(reader, found, 0, page) == [[100 + number] * PAGE_BYTES for number in range(page)]
        with pytest.raises(ValueError, match="not what was copied"):
            taken(reader, found, page, count)
    else:
        assert count == page


@given(st.integers(0, 5000), st.integers(1, 300))
def test_a_copy_has_room_for_the_pages_that_it_says(size: int, page_bytes: int) -> None:
    size += bytes_for(0, page_bytes)
    pages = pages_in(size, page_bytes)
    assert bytes_for(pages, page_bytes) <= size < bytes_for(pages + 1, page_bytes)
    assert CopyWriter(np.zeros(size, np.uint8), page_bytes, KIND, 0).pages.shape == (pages, page_bytes)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 4))
def test_every_byte_of_a_page_belongs_to_one_row(row_bytes: list[int], pages: int) -> None:
    layout = PageLayout(tuple(row_bytes))
    seen = np.zeros(pages * layout.page_bytes, int)
    for size, layers in layout.layers_by_size().items():
        for layer in layers:
            for row in layout.rows(size, np.arange(pages)).tolist():
                start = layout.start(layer) + row * size
                seen[start : start + size] += 1
    assert seen.max() == 1
    assert seen.sum() == pages * PAGE * sum(row_bytes)


@pytest.mark.parametrize("row_bytes", [(), (4, 0)])
def test_a_cache_without_rows_is_refused(row_bytes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        PageLayout(row_bytes)
