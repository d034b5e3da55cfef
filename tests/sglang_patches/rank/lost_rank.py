"""A rank that takes over, beside the memory of one that was lost."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eep.anchor.anchor import SOCKET
from eep.anchor.memory_holder import MemoryHolder
from eep.requests.kv.kv_journal import fingerprint
from eep.view import View
from sglang_patches.rank import next_life, rank_session
from sglang_patches.rank.kv import anchored_pool, lost_pool
from sglang_patches.rank.kv.anchored_pool import AnchoredPool
from sglang_patches.rank.kv.lost_context import LostLife

LAYERS, SLOTS, ROWS, CONTEXT = 2, 200, 6, 128
LOST = LostLife(2, 3, "request")
PROMPT, ANSWERED = list(range(40, 80)), [7, 8, 9]


class Allocator:
    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.free_slots = list(range(100, 190))
        self.cache = SimpleNamespace(k_buffer=layers[:LAYERS], v_buffer=layers[LAYERS:])

    def get_kvcache(self) -> Any:
        return self.cache

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken)

    def free(self, slots: torch.Tensor) -> None:
        self.free_slots += slots.tolist()


class Rank:
    """Rank 0, which takes over, beside what rank 2 has left behind."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("_takings", []), ("_conditions", []), ("_joined_at", None)):
            monkeypatch.setattr(next_life, name, value)
        self.lost, self.mine = (self._pool(directory, monkeypatch, *who) for who in ((2, 3), (0, 0)))
        monkeypatch.setattr(anchored_pool, "_pool", self.mine)
        monkeypatch.setattr(lost_pool, "_lost", {})
        for number, layer in enumerate(self.lost.layers):
            layer.copy_(torch.arange(layer.numel(), dtype=layer.dtype).view(layer.shape) + 10000 * number)
        assert self.lost.table is not None
        assert self.lost.journal is not None
        self.slots_there = [3 * place % SLOTS for place in range(CONTEXT)]
        self.lost.table[4] = torch.tensor(self.slots_there, dtype=torch.int32)
        self.lost.journal.name(4, fingerprint("request"))
        self.count(len(PROMPT) + len(ANSWERED) - 1)
        self.view = View(5, (0, 1, 3), (0, 0, 3, 0))
        member = SimpleNamespace(wait_for_view=lambda **_: None, newest_view=self.view)
        session = SimpleNamespace(joined=SimpleNamespace(view=self.view, member=member))
        monkeypatch.setattr(rank_session, "get_session", lambda: session)
        self.session = session
        self.allocator = Allocator(self.mine.layers)
        self.mine.cache = self.allocator.cache
        self.request = SimpleNamespace(
            rid="request~1", origin_input_ids=array("q", PROMPT), output_ids=array("q", ANSWERED), extra_key=None
        )

    def count(self, tokens: int) -> None:
        """So many tokens are judged, the lost rank has noted."""
        assert self.lost.journal is not None
        self.lost.journal.count(np.array([4]), np.array([tokens]))

    @staticmethod
    def _pool(directory: Path, monkeypatch: pytest.MonkeyPatch, rank: int, life: int) -> AnchoredPool:
        for name, value in (("EEP_CONTROL_DIR", directory), ("EEP_RANK", rank), ("EEP_INCARNATION", life)):
            monkeypatch.setenv(name, str(value))
        pool = AnchoredPool()
        pool.take_table((ROWS, CONTEXT))
        shape = torch.empty(SLOTS, 2, 4)
        pool.take_cache([shape] * LAYERS * 2)
        next_life.look_whether_free()
        return pool


@contextmanager
def lost_rank(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    holder, (told, ends) = MemoryHolder(str(directory / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    made = Rank(directory, monkeypatch)
    yield made
    let_go(made.lost)
    let_go(made.mine)
    os.write(ends, b"x")
    thread.join(10)
    for descriptor in (told, ends, *(held[2] for held in holder._held.values())):
        os.close(descriptor)


def let_go(pool: AnchoredPool) -> None:
    """As the end of its process would."""
    pool.anchor.close()
    for memory in pool.anchor._held.values():
        memory.close()
