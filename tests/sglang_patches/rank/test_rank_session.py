"""When a rank says that it is ready, its peers can already see what it holds. Needs no SGLang."""

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
from sglang_patches.options import ServerOptions
from sglang_patches.rank import rank_session
from sglang_patches.rank.expert_weights import ExpertWeights
from sglang_patches.rank.model_facts import ModelFacts
from sglang_patches.rank.rank_data_plane import RankDataPlane
from sglang_patches.rank.rank_session import RankSession
from sglang_patches.rank.token_forms import MoeShape
from tests.experts import model


def test_there_is_no_session_before_the_weights_are_loaded() -> None:
    with pytest.raises(RuntimeError, match="no session yet"):
        rank_session.get_session()


def test_what_a_rank_holds_is_there_to_see_before_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a peer that sees it in a view may look too early, and would not know its checksums until the next view."""
    seen: dict[str, list[str]] = {}

    def look(when: str) -> None:
        seen[when] = list(DirectoryRegistry(tmp_path / "experts" / "held").scan("held/"))

    def session(*arguments: Any) -> SimpleNamespace:
        look("ready")
        member = SimpleNamespace(advance=lambda: None, run=lambda: None, may_take_long=lambda may: None)
        return SimpleNamespace(member=member, bookkeeping=())

    (tmp_path / "experts").mkdir(mode=0o700)
    monkeypatch.setenv(INCARNATION, "5")
    monkeypatch.setattr(rank_session, "Session", session)
    monkeypatch.setattr(rank_session, "member_rendezvous", lambda: tmp_path)
    monkeypatch.setattr(rank_session.process_groups, "world", lambda: None)
    monkeypatch.setattr(
        rank_session.garbage_collector, "freeze_this_process", lambda collect: look("left out of collections")
    )
    slots = 4
    first = plan_placement(np.ones((model.LAYERS, model.EXPERTS)), None, range(2), slots, [0, 0])
    shared = SharedMemory.create("experts", model.layout(slots).region_bytes)
    memory = ExpertMemory(model.layout(slots), shared.bytes_at(0, shared.size))
    model.load(memory, first, 1)
    sums = Checksums.of_rank(memory, first, 1)
    facts = ModelFacts(1, "cpu", (8,), ServerOptions(ranks=2, max_ranks=2))
    facts.shape = MoeShape(model.EXPERTS, slots, 8, 2, torch.float32)
    facts.__dict__["first_placement"] = first
    rank = RankSession(facts, RankDataPlane(facts), ExpertWeights(memory, shared, sums), None, tmp_path)
    assert rank.join() is rank.join()
    # It is frozen as well, since it stays as long as the process does.
    assert seen == {"left out of collections": ["held/r1.i5"], "ready": ["held/r1.i5"]}
    rank.coverage.close()
    shared.close()
