"""Contexts are copied to host memory as they grow, and a rank takes a request over from there when the cache is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from eep import faults
from eep.data_plane.memory.shm import SharedMemory
from eep.requests.kv.copy_index import CopyReader, bytes_for
from eep.requests.kv.copy_layout import PAGE
from eep.requests.kv.copy_record import read_copies
from eep.requests.kv.kv_journal import fingerprint
from sglang_patches.rank.kv import host_copy, lost_pool
from sglang_patches.rank.kv.copied_pages import COPY, kind_of, layout_of
from sglang_patches.rank.kv.host_copy import HostCopy
from sglang_patches.rank.kv.lost_context import LostContext
from sglang_patches.rank.kv.lost_pool import NoRestore
from tests.sglang_patches.rank.lost_rank import ANSWERED, CONTEXT, LOST, PROMPT, SLOTS, Rank, let_go, lost_rank

JUDGED = len(PROMPT) + len(ANSWERED) - 1
WHOLE = JUDGED // PAGE * PAGE
ROOM = 20


class Copying:
    """The lost rank has copied its contexts, and its cache cannot be reached any more."""

    def __init__(self, ranks: Rank, monkeypatch: pytest.MonkeyPatch, pages: int = ROOM) -> None:
        def gone(*_: Any) -> None:
            raise OSError("the GPU has fallen off the bus")

        monkeypatch.setattr(lost_pool, "get_lost_pool", gone)
        self.ranks, self.monkeypatch = ranks, monkeypatch
        self.page_bytes = layout_of(ranks.lost.layers).page_bytes
        self.size = bytes_for(pages, self.page_bytes)
        self.copy = HostCopy(ranks.lost, self.size)
        ranks.mine.backup_bytes = self.size

    def context(self) -> LostContext:
        return LostContext(self.ranks.mine, LOST, self.ranks.mine.cache)

    def restored(self, first: int = 0) -> int:
        """How many tokens are had, all of them right."""
        context = self.context()
        count = context.tokens(JUDGED, 1)
        slots = torch.arange(100, 100 + count - first)
        context.copy(slots, first)
        assert context.origin.source == "host"
        for mine, there in zip(self.ranks.mine.layers, self.ranks.lost.layers, strict=True):
            assert torch.equal(mine[slots], there[self.ranks.slots_there[first:count]])
        return count

    def reader(self) -> CopyReader:
        content, _ = lost_pool.mapped(self.ranks.mine, LOST.rank, COPY, self.size, SharedMemory)
        return CopyReader(content.numpy(), self.page_bytes, kind_of(self.ranks.mine.layers))

    def tokens_of(self, wire: str) -> int:
        found = self.reader().find(LOST.incarnation, wire)
        return 0 if found is None else found.tokens

    def note(self, row: int, wire: str, tokens: int) -> None:
        assert self.ranks.lost.table is not None
        assert self.ranks.lost.journal is not None
        self.ranks.lost.table[row] = torch.arange(CONTEXT, dtype=torch.int32) % SLOTS
        self.ranks.lost.journal.name(row, fingerprint(wire))
        self.ranks.lost.journal.count(np.array([row]), np.array([tokens]))

    def meanwhile(self, act: Callable[[], None]) -> None:
        """In the middle of the copy, once."""
        left = [act]
        self.monkeypatch.setattr(
            faults, "at", lambda point: left.pop()() if point == "kv.backup.mid" and left else None
        )


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    with lost_rank(tmp_path, monkeypatch) as ranks:
        yield Copying(ranks, monkeypatch)


def test_whole_pages_come_along_when_the_cache_is_gone(rank: Copying) -> None:
    assert not rank.copy.copy_some()
    assert rank.restored() == WHOLE


@pytest.mark.parametrize("first", [1, PAGE - 1, PAGE, PAGE + 5])
def test_what_is_there_already_is_not_copied(rank: Copying, first: int) -> None:
    rank.copy.copy_some()
    before = [layer.clone() for layer in rank.ranks.mine.layers]
    assert rank.restored(first) == WHOLE
    rest = [slot for slot in range(SLOTS) if not 100 <= slot < 100 + WHOLE - first]
    for mine, was in zip(rank.ranks.mine.layers, before, strict=True):
        assert torch.equal(mine[rest], was[rest])


def test_a_context_is_copied_in_parts(rank: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.copy, "_most", 1)
    assert rank.copy.copy_some()
    assert rank.tokens_of(LOST.wire) == PAGE
    assert rank.copy.copy_some()
    assert not rank.copy.copy_some()
    assert rank.restored() == WHOLE


def test_pages_are_read_back_in_parts(rank: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_patches.rank.kv.lost_copy._AT_ONCE", 1)
    rank.copy.copy_some()
    assert rank.restored(first=3) == WHOLE


def test_the_cache_is_taken_where_it_can_be_reached(rank: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.copy.copy_some()
    monkeypatch.undo()
    monkeypatch.setattr(lost_pool, "_lost", {})
    origin = lost_pool.AnchoredContext(rank.ranks.mine, LOST.rank, LOST.incarnation, LOST.wire)
    assert (origin.source, origin.tokens) == ("anchor", JUDGED)


def test_a_request_of_which_the_journal_says_nothing_is_looked_for_in_the_copy(rank: Copying) -> None:
    """Such as when the next life has its table already."""
    rank.copy.copy_some()
    journal = SimpleNamespace(find=lambda *_: None)
    rank.monkeypatch.setattr(lost_pool, "get_lost_pool", lambda *_: SimpleNamespace(journal=journal))
    assert rank.restored() == WHOLE


def test_without_a_copy_the_reason_is_that_of_the_cache(rank: Copying) -> None:
    rank.ranks.mine.backup_bytes = 0
    with pytest.raises(OSError, match=r"fallen off the bus$"):
        rank.context()


def test_a_request_that_was_not_copied_is_computed_again(rank: Copying) -> None:
    with pytest.raises(NoRestore, match="fallen off the bus; rank 2 has copied nothing of it"):
        rank.context()


def test_a_page_that_is_damaged_is_not_used(rank: Copying) -> None:
    rank.copy.copy_some()
    context = rank.context()
    rank.reader().pages[1, -1] ^= 1
    with pytest.raises(ValueError, match="tokens 16 to 31 are not what was copied"):
        context.copy(torch.arange(WHOLE))


def test_a_line_that_is_withdrawn_meanwhile_leaves_nothing(rank: Copying) -> None:
    assert rank.ranks.lost.journal is not None
    rank.meanwhile(lambda: rank.ranks.lost.journal.withdraw(4))  # type: ignore[union-attr]
    rank.copy.copy_some()
    assert rank.tokens_of(LOST.wire) == 0
    rank.copy.copy_some()
    assert rank.copy._plan.covered == 0


def test_a_row_that_is_the_same_request_again_meanwhile_leaves_nothing(rank: Copying) -> None:
    """What was read in between may be another's."""

    def again() -> None:
        assert rank.ranks.lost.journal is not None
        rank.ranks.lost.journal.withdraw(4)
        rank.note(4, LOST.wire, JUDGED)

    rank.meanwhile(again)
    rank.copy.copy_some()
    assert rank.tokens_of(LOST.wire) == 0
    rank.copy.copy_some()
    assert rank.tokens_of(LOST.wire) == WHOLE


def test_a_row_of_which_the_slots_change_meanwhile_is_copied_again(
    rank: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has found the prefix in its cache: the row gets those slots, and its own are free for others. That this is seen,
    ``tests/data_plane/test_page_copy.py`` shows."""
    table, copy = rank.ranks.lost.table, rank.copy._copy_pages
    assert table is not None

    def change(places: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        same = copy(places, pages)
        table[4, PAGE + 2] = rank.ranks.slots_there[PAGE + 2] = 199
        monkeypatch.setattr(rank.copy, "_copy_pages", copy)
        return same & (places != 4 * CONTEXT + PAGE)

    monkeypatch.setattr(rank.copy, "_copy_pages", change)
    rank.copy.copy_some()
    assert rank.tokens_of(LOST.wire) == 0
    rank.copy.copy_some()
    assert rank.restored() == WHOLE


def test_a_request_that_ended_is_dropped_and_its_pages_serve_others(rank: Copying) -> None:
    rank.copy.copy_some()
    assert rank.ranks.lost.journal is not None
    rank.ranks.lost.journal.withdraw(4)
    rank.note(4, "other", 3 * PAGE)
    rank.copy.copy_some()
    assert (rank.tokens_of(LOST.wire), rank.tokens_of("other")) == (0, 3 * PAGE)


def test_when_it_is_full_the_longest_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lost_rank(tmp_path, monkeypatch) as ranks:
        rank = Copying(ranks, monkeypatch, pages=6)
        rank.copy.copy_some()
        rank.note(1, "long", 5 * PAGE)
        rank.copy.copy_some()
        assert (rank.tokens_of(LOST.wire), rank.tokens_of("long")) == (PAGE, 5 * PAGE)
        assert rank.copy._plan.behind == PAGE
        assert rank.restored() == PAGE


def test_the_next_life_takes_the_memory_over(rank: Copying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.copy.copy_some()
    later = Rank._pool(tmp_path, monkeypatch, LOST.rank, LOST.incarnation + 1)
    HostCopy(later, rank.size)
    with pytest.raises(NoRestore, match="has copied nothing of it"):
        rank.context()
    held = later.anchor.find(LOST.rank, COPY)
    assert held is not None
    assert held[0].incarnation == LOST.incarnation + 1
    os.close(held[1])
    assert rank.copy._writer.pages.any(), "it is the same memory"
    let_go(later)


def test_a_cache_of_another_shape_is_not_taken(rank: Copying) -> None:
    rank.copy.copy_some()
    rank.ranks.mine.layers = [torch.empty(SLOTS, 4, 2) for _ in rank.ranks.mine.layers]
    with pytest.raises(NoRestore, match="has copied nothing of it"):
        rank.context()


def test_layers_with_rows_of_several_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of keys and of values, where values are shorter."""
    with lost_rank(tmp_path, monkeypatch) as ranks:
        made = [torch.randn(SLOTS, *shape) for shape in ((2, 6), (2, 4), (2, 6), (2, 4))]
        ranks.lost.layers = made
        ranks.mine.layers = [torch.zeros_like(each) for each in made]
        rank = Copying(ranks, monkeypatch)
        rank.copy.copy_some()
        assert rank.restored(first=7) == WHOLE


def test_too_little_for_a_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lost_rank(tmp_path, monkeypatch) as ranks:
        least = bytes_for(1, layout_of(ranks.lost.layers).page_bytes)
        with pytest.raises(SystemExit, match=f"leaves {least - 1} bytes for rank 2, and 16 tokens .* take {least};"):
            HostCopy(ranks.lost, least - 1)
        HostCopy(ranks.lost, least)


def test_a_thread_keeps_copying(rank: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_copy", None)
    monkeypatch.setattr(host_copy, "HostCopy", lambda *_: rank.copy)
    rank.ranks.lost.backup_bytes = rank.size
    host_copy.begin(rank.ranks.lost)
    for tokens in (2 * PAGE, 5 * PAGE):
        rank.note(1, "growing", tokens)
        end = time.monotonic() + 20
        while rank.tokens_of("growing") < tokens and time.monotonic() < end:
            time.sleep(0.01)
        assert rank.tokens_of("growing") == tokens
    rank.copy.close()


def test_nothing_is_copied_unless_it_is_asked_for(rank: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_copy", None)
    host_copy.begin(rank.ranks.lost)
    assert host_copy._copy is None


def test_a_failure_ends_the_copying_and_nothing_else(rank: Copying, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("out of order")

    rank.meanwhile(fail)
    rank.copy.start()
    rank.copy.close()
    assert "contexts of rank 2 are no longer copied" in caplog.text
    assert rank.tokens_of(LOST.wire) == 0


def test_a_rank_that_is_killed_in_the_middle_leaves_nothing_of_it(rank: Copying) -> None:
    rank.monkeypatch.setattr(rank.copy, "_most", 1)
    rank.copy.copy_some()
    child = os.fork()
    if not child:
        faults.arm("kv.backup.mid", "kill")
        rank.copy.copy_some()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert rank.restored() == PAGE


def test_gauges_say_how_much_is_copied_and_how_much_is_not(rank: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(rank.copy._metrics, "set", lambda name, value, label: told.update({name: (value, label)}))
    monkeypatch.setattr(rank.copy, "_most", 1)
    monkeypatch.setattr(host_copy, "_TELL_S", 0.0)
    rank.copy.copy_some()
    assert told == {"kv_backup_covered": (PAGE, "2"), "kv_backup_lag": (PAGE, "2")}
    assert read_copies(rank.ranks.lost.anchor.directory, {2: rank.ranks.lost.life}) == {
        **{"bytes": rank.size, "room_tokens": ROOM * PAGE, "covered_tokens": PAGE, "lag_tokens": PAGE},
    }
