"""``eep make-model``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eep.cli import main
from eep.drill.models.checkpoint import make_model, write_model
from eep.drill.models.model_sizes import SIZES


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
    from eep.experts.checkpoint.checkpoint_reader import CheckpointReader

    reader = CheckpointReader(model)
    assert reader.experts == 16
    assert reader.layout(4).layers == 4


def test_a_size_is_what_the_checkpoint_has(tmp_path: Path) -> None:
    """The shape of the large one, with less of everything that only costs time."""
    from eep.experts.checkpoint.checkpoint_reader import CheckpointReader

    size = replace(SIZES["large"], layers=2, hidden=64, moe_intermediate=16, heads=4)
    reader = CheckpointReader(write_model(tmp_path / "model", size))
    assert (reader.experts, reader.layout(32).layers) == (32, 2)
    with pytest.raises(ValueError, match="tiny, small, large"):
        make_model(tmp_path / "huge", size="huge")


def test_a_model_for_longer_contexts_has_the_same_weights(model: Path, tmp_path: Path) -> None:
    longer = make_model(tmp_path / "longer", context=20000)
    assert json.loads((longer / "config.json").read_text())["max_position_embeddings"] == 20000
    assert (longer / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_experts_in_fp8_are_those_of_the_model(model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from eep.drill.models.block_fp8 import BLOCK
    from eep.experts.checkpoint.checkpoint_reader import CheckpointReader

    assert main(["make-model", str(tmp_path / "fp8"), "--fp8"]) == 0
    plain, fp8 = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "fp8"))
    experts = {name for name in plain if ".experts." in name}
    assert experts
    assert set(fp8) == set(plain) | {f"{name}_scale_inv" for name in experts}
    for name, tensor in plain.items():
        if name in experts:
            scales = fp8[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            torch.testing.assert_close(fp8[name].float() * scales, tensor.float(), rtol=0.07, atol=2e-3)
        else:
            assert torch.equal(fp8[name], tensor)
    told = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert told["weight_block_size"] == [128, 128]
    assert "model.layers.0.self_attn.q_proj" in told["modules_to_not_convert"]
    assert len(CheckpointReader(tmp_path / "fp8").layout(4).tensors) == 4


def test_a_matrix_that_is_not_of_whole_blocks_is_not_quantised() -> None:
    import torch

    from eep.drill.models.block_fp8 import quantise

    with pytest.raises(ValueError, match="100 x 128"):
        quantise(torch.zeros(100, 128))


def tensors_of(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "architecture", "parts"),
    [
        (
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            ("kv_b_proj", "gate.e_score_correction_bias", "shared_experts.up_proj"),
        ),
        ("glm4-moe", "Glm4MoeForCausalLM", ("k_proj.bias", "gate.e_score_correction_bias", "shared_experts.up_proj")),
        ("gpt-oss", "GptOssForCausalLM", ("sinks", "router.bias", "experts.gate_up_proj_bias")),
    ],
)
def test_a_family_has_what_makes_it(tmp_path: Path, family: str, architecture: str, parts: tuple[str, ...]) -> None:
    """And nothing of it is zero, or no answer would depend on it."""
    from eep.experts.checkpoint.checkpoint_reader import CheckpointReader

    assert main(["make-model", str(tmp_path / "model"), "--family", family]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [architecture]
    stored = tensors_of(tmp_path / "model")
    for part in parts:
        found = [tensor for name, tensor in stored.items() if part in name]
        assert found, part
        assert all(tensor.float().std() > 0.05 for tensor in found), part
    reader = CheckpointReader(tmp_path / "model")
    assert reader.experts == 16
    has_dense_layer = any(name.startswith("model.layers.0.mlp.up_proj") for name in stored)
    assert reader.layout(1).layers == (3 if has_dense_layer else 4)
    assert has_dense_layer == (family != "gpt-oss")


def test_experts_of_another_family_in_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["make-model", str(tmp_path / "fp8"), "--family", "deepseek-v3", "--fp8"]) == 0
    stored = tensors_of(tmp_path / "fp8")
    assert stored["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.mlp.shared_experts.up_proj.weight"].dtype == torch.bfloat16
    capsys.readouterr()
    assert main(["make-model", str(tmp_path / "no"), "--family", "gpt-oss", "--fp8"]) == 1
    assert "gpt-oss are not published in fp8" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_there_are_no_other_families(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen3, deepseek-v3, glm4-moe, gpt-oss"):
        make_model(tmp_path / "model", family="mixtral")
