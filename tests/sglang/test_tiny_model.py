"""``eep make-model``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eep.cli import main
from eep.tiny_model import SIZES, make_model, write_model


def test_the_same_seed_gives_the_same_bytes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-model", str(tmp_path / "again")]) == 0
    assert "wrote" in capsys.readouterr().out
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert main(["make-model", str(tmp_path / "other"), "--seed", "1"]) == 0
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_it_does_not_write_over_anything(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-model", str(model)]) == 1
    assert "not an empty directory" in capsys.readouterr().err


def test_text_and_tokens_go_both_ways(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "Grüße, 世界!\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_experts_can_be_read_from_it(model: Path) -> None:
    from eep.experts.checkpoint import CheckpointReader

    reader = CheckpointReader(model)
    assert reader.experts == 16
    assert reader.layout(4).layers == 4


def test_a_size_is_what_the_checkpoint_has(tmp_path: Path) -> None:
    """The shape of the large one, with less of everything that only costs time."""
    from eep.experts.checkpoint import CheckpointReader

    size = replace(SIZES["large"], layers=2, hidden=64, moe_intermediate=16, heads=4)
    reader = CheckpointReader(write_model(tmp_path / "model", size))
    assert (reader.experts, reader.layout(32).layers) == (32, 2)
    with pytest.raises(ValueError, match="tiny, small, large"):
        make_model(tmp_path / "huge", size="huge")
