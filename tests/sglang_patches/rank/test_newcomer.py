"""When a rank says that it is ready, the others can already see what it holds. No SGLang needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eep.control.launch.processes import INCARNATION
from eep.data_plane.memory.shm import SharedMemory
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory
from eep.experts.placement.slot_plan import plan_placement
from eep.experts.registry.directory_registry import DirectoryRegistry
from tests.experts import model

instance = pytest.importorskip("sglang_patches.rank.instance", reason="the SGLang plugin is not here")


def test_what_a_rank_holds_is_there_to_see_before_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those who see it in a view may look too early, and would not know its checksums until the next one."""
    seen: dict[str, list[str]] = {}

    def look(when: str) -> None:
        seen[when] = list(DirectoryRegistry(tmp_path / "experts" / "held").scan("held/"))

    def session(*arguments: Any) -> SimpleNamespace:
        look("ready")
        return SimpleNamespace()

    (tmp_path / "experts").mkdir(mode=0o700)
    monkeypatch.setenv(INCARNATION, "5")
    monkeypatch.setattr(instance, "Session", session)
    monkeypatch.setattr(instance, "member_rendezvous", lambda: tmp_path)
    monkeypatch.setattr(instance.Instance, "directory", tmp_path)
    monkeypatch.setattr(instance.process_groups, "world", lambda: None)
    monkeypatch.setattr(
        instance.garbage_collector, "leave_out_what_is_here", lambda collect: look("left out of collections")
    )
    slots = 4
    first = plan_placement(np.ones((model.LAYERS, model.EXPERTS)), None, range(2), slots, [0, 0])
    shared = SharedMemory.create("experts", model.layout(slots).region_bytes)
    memory = ExpertMemory(model.layout(slots), shared.bytes_at(0, shared.size))
    model.load(memory, first, 1)
    sums = Checksums.of_rank(memory, first, 1)
    rank = instance.Instance(1, (8,), "cpu", instance.options.Options(ranks=2, max_ranks=2))
    rank.weights = SimpleNamespace(memory=memory, shared=shared, checksums=sums)
    rank.shape = SimpleNamespace(experts=model.EXPERTS, slots_per_rank=slots, dtype=torch.float32)
    rank.__dict__["first_placement"] = first
    assert rank.session is rank.session
    # Left out as well, since it stays as long as the process does.
    assert seen == {"left out of collections": ["held/r1.i5"], "ready": ["held/r1.i5"]}
    rank.coverage.close()
    shared.close()
