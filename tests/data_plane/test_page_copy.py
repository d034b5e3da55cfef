"""Rows that a table names go to pages in host memory, and what changed meanwhile is told."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from eep.data_plane.memory.page_copy import PageCopy

TOKENS, PLACES, ROWS = 4, 40, 30


def layers() -> list[torch.Tensor]:
    """Rows of different sizes, one of which is no multiple of what is copied at once."""
    make = torch.Generator().manual_seed(3)
    return [torch.randint(256, (ROWS, size), dtype=torch.uint8, generator=make) for size in (32, 5, 48)]


def page_of(table: torch.Tensor, some: list[torch.Tensor], place: int) -> bytes:
    rows = table[place : place + TOKENS].long()
    return b"".join(layer[rows].numpy().tobytes() for layer in some)


def copier(table: torch.Tensor, some: list[torch.Tensor], content: torch.Tensor, most: int = 3) -> PageCopy:
    return PageCopy(table, some, content, page_bytes=content.shape[1], page_tokens=TOKENS, most=most)


def test_a_page_has_the_rows_of_its_places_layer_by_layer() -> None:
    some, table = layers(), torch.randperm(PLACES, dtype=torch.int32) % ROWS
    size = TOKENS * (32 + 5 + 48)
    content = torch.zeros(6, size + 20, dtype=torch.uint8)
    copy = copier(table, some, content)
    assert copy(np.array([8, 0, 33]), np.array([5, 2, 0])).tolist() == [True] * 3
    for place, page in ((8, 5), (0, 2), (33, 0)):
        assert content[page, :size].numpy().tobytes() == page_of(table, some, place)
    assert not content[[1, 3, 4]].any(), "other pages are left alone"
    assert not content[:, size:].any(), "and what lies behind the last layer"


def test_nothing_is_copied_where_there_is_nothing_to_copy() -> None:
    content = torch.zeros(2, TOKENS * 85, dtype=torch.uint8)
    copy = copier(torch.zeros(PLACES, dtype=torch.int32), layers(), content)
    assert len(copy(np.empty(0, np.int64), np.empty(0, np.int64))) == 0
    assert not content.any()


def test_more_pages_than_there_is_room_for_are_refused() -> None:
    content = torch.zeros(6, TOKENS * 85, dtype=torch.uint8)
    copy = copier(torch.zeros(PLACES, dtype=torch.int32), layers(), content, most=2)
    with pytest.raises(ValueError, match="2 are copied at once"):
        copy(np.arange(3), np.arange(3))
    assert not content.any()


def test_layers_that_do_not_fit_a_page_are_refused() -> None:
    content = torch.zeros(2, TOKENS * 85 - 1, dtype=torch.uint8)
    copy = copier(torch.zeros(PLACES, dtype=torch.int32), layers(), content)
    with pytest.raises(ValueError, match="340 bytes for a page of 339"):
        copy(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert not content.any()


def test_what_is_not_in_one_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="in one piece"):
        copier(torch.zeros(2 * PLACES, dtype=torch.int32)[::2], layers(), torch.zeros(2, 340, dtype=torch.uint8))


def test_it_is_told_when_the_table_changes_meanwhile() -> None:
    """Another thread writes the table all the time. What counts as the same is made of rows that were there together."""
    wide = [torch.arange(2 * TOKENS, dtype=torch.int32).repeat_interleave(1 << 16).view(2 * TOKENS, -1)]
    table = torch.zeros(TOKENS, dtype=torch.int32)
    content = torch.zeros(1, TOKENS << 18, dtype=torch.uint8)
    copy = copier(table, wide, content, most=1)
    over, seen = threading.Event(), set[bool]()

    def change() -> None:
        while not over.is_set():
            for first in (0, TOKENS):
                table.copy_(torch.arange(first, first + TOKENS, dtype=torch.int32))

    writer = threading.Thread(target=change)
    writer.start()
    end = time.monotonic() + 60
    while False not in seen and time.monotonic() < end:
        (same,) = copy(np.zeros(1, np.int64), np.zeros(1, np.int64)).tolist()
        seen.add(same)
    over.set()
    writer.join()
    assert False in seen
    assert copy(np.zeros(1, np.int64), np.zeros(1, np.int64)).tolist() == [True]
    first = int(table[0])
    assert content.view(torch.int32).view(TOKENS, -1)[:, 0].tolist() == list(range(first, first + TOKENS))
