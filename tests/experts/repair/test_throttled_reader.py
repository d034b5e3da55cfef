"""A source that a drill makes slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.repair.reader import Want
from eep.experts.repair.throttled_reader import DISK_MS, throttled
from tests.experts import model


def test_every_expert_takes_as_long_as_the_drill_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CheckpointReader(model.save_checkpoint(tmp_path / "model"))
    assert throttled(reader) is reader
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv(DISK_MS, "250")
    slow = throttled(reader)
    assert slow.alive()
    into = [[torch.empty_like(piece) for piece in model.pieces(0, expert)] for expert in (1, 2)]
    slow.read([Want(0, expert, 0, pieces) for expert, pieces in zip((1, 2), into, strict=True)])
    assert slept == [0.25, 0.25]
    assert all(torch.equal(got, right) for got, right in zip(into[1], model.pieces(0, 2), strict=True))
