from __future__ import annotations

import importlib
from typing import Any

from eep.anchor.held_kinds import KINDS, kind_of_held, sum_held


def test_bytes_are_summed_by_what_they_are_for() -> None:
    held = [{"name": name, "size": size} for name, size in (("kv", 1), ("rows", 2), ("dense-0-ab", 4), ("news", 8))]
    assert sum_held(held) == {"weights": 4, "contexts": 3, "context-copies": 0, "other": 8}
    assert sum_held([]).keys() == set(KINDS)


def test_every_name_that_ranks_of_a_server_give_has_a_kind(sglang: None) -> None:
    pool: Any = importlib.import_module("sglang_patches.rank.kv.anchored_pool")
    pages: Any = importlib.import_module("sglang_patches.rank.kv.copied_pages")
    weights: Any = importlib.import_module("sglang_patches.rank.weights.kept_weights")
    contexts = {kind_of_held(name) for name in (pool.CACHE, pool.TABLE, pool.JOURNAL, pool.BUDGET)}
    names = (weights.WEIGHTS, weights.EXPERTS, weights.SLOTS, f"{weights._DENSE}0-ab")
    assert contexts == {"contexts"}
    assert kind_of_held(pages.COPY) == "context-copies"
    assert {kind_of_held(name) for name in names} == {"weights"}
