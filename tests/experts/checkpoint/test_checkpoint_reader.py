"""Experts read from disk by offset equal those of the model that was saved, for every family."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.checkpoint.families import FAMILIES, CheckpointFamily
from eep.experts.layout import ExpertMemory
from eep.experts.repair.reader import SourceLost, Want

transformers = pytest.importorskip("transformers", reason="checkpoints are made with transformers")

COMMON = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK = {**COMMON, **LATENT, "moe_intermediate_size": 8, "n_routed_experts": 4, "first_k_dense_replace": 1}

MODELS = {
    "DeepseekV2": ("deepseek", DEEPSEEK, [1, 2]),
    "DeepseekV3": ("deepseek", {**DEEPSEEK, "n_group": 1, "topk_group": 1}, [1, 2]),
    "Qwen2Moe": (
        "qwen-moe",
        {**COMMON, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4},
        [0, 1, 2],
    ),
    "Qwen3Moe": (
        "qwen-moe",
        {**COMMON, "moe_intermediate_size": 8, "num_experts": 4, "head_dim": 8},
        [0, 1, 2],
    ),
    "Mixtral": ("mixtral", {**COMMON, "num_local_experts": 4}, [0, 1, 2]),
    "GptOss": ("fused", {**COMMON, "num_local_experts": 4, "head_dim": 8}, [0, 1, 2]),
}


def read(reader: CheckpointReader, layer: int, expert: int) -> dict[str, torch.Tensor]:
    layout = reader.layout(1)
    memory = ExpertMemory(layout, torch.zeros(layout.region_bytes, dtype=torch.uint8))
    reader.read([Want(layer, expert, -1, memory.pieces(layer, 0))])
    return {name: tensor[0] for name, tensor in memory.tensors(layer).items()}


@pytest.mark.parametrize("model_name", MODELS)
def test_disk_equals_the_live_model(model_name: str, tmp_path: pathlib.Path) -> None:
    family, settings, layers = MODELS[model_name]
    config = getattr(transformers, f"{model_name}Config")(**settings)
    model = getattr(transformers, f"{model_name}ForCausalLM")(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "several files, as real checkpoints have"
    live = model.state_dict()
    for reader in (CheckpointReader(tmp_path), CheckpointReader(tmp_path, family)):
        assert reader.experts == 4
        assert reader.layout(1).layers == len(layers)
        for index, layer in enumerate(layers):
            for expert in range(4):
                found = read(reader, index, expert)
                prefix = f"model.layers.{layer}.mlp.experts"
                assert torch.equal(found.pop("w13_weight"), live[f"{prefix}.gate_up_proj"][expert])
                assert torch.equal(found.pop("w2_weight"), live[f"{prefix}.down_proj"][expert])
                for ours, theirs in (
                    ("w13_weight_bias", "gate_up_proj_bias"),
                    ("w2_weight_bias", "down_proj_bias"),
                ):
                    assert (ours in found) == (f"{prefix}.{theirs}" in live)
                    if ours in found:
                        assert torch.equal(found.pop(ours), live[f"{prefix}.{theirs}"][expert])
                assert not found


def expert_tensors(layers: list[int], make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name.format(layer=layer): tensor for layer in layers for name, tensor in make().items()}


def test_gpt_oss_as_published_in_blocks_and_scales(tmp_path: pathlib.Path) -> None:
    def layer() -> dict[str, torch.Tensor]:
        name = "model.layers.{layer}.mlp.experts."
        return {
            f"{name}{part}_{kind}": torch.randint(0, 255, shape, dtype=torch.uint8)
            for part in ("gate_up_proj", "down_proj")
            for kind, shape in (("blocks", (4, 8, 2, 16)), ("scales", (4, 8, 2)))
        } | {f"{name}{part}_bias": torch.randn(4, 8) for part in ("gate_up_proj", "down_proj")}

    saved = expert_tensors([0, 1], layer)
    save_file(saved, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    assert reader.family.name == "gpt-oss"
    found = read(reader, 1, 3)
    assert set(found) == set(FAMILIES["gpt-oss"].tensors)
    assert torch.equal(found["w13_weight_scale"], saved["model.layers.1.mlp.experts.gate_up_proj_scales"][3])
    assert torch.equal(found["w2_weight_bias"], saved["model.layers.1.mlp.experts.down_proj_bias"][3])


def test_deepseek_fp8_with_block_scales(tmp_path: pathlib.Path) -> None:
    saved = {}
    for expert in range(2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.3.mlp.experts.{expert}.{part}"
            saved[f"{name}.weight"] = torch.randn(8, 8).to(torch.float8_e4m3fn)
            saved[f"{name}.weight_scale_inv"] = torch.randn(1, 1)
    save_file(saved, tmp_path / "model.safetensors")
    found = read(CheckpointReader(tmp_path), 0, 1)
    name = "model.layers.3.mlp.experts.1"
    both = torch.cat([saved[f"{name}.gate_proj.weight_scale_inv"], saved[f"{name}.up_proj.weight_scale_inv"]])
    assert torch.equal(found["w13_weight_scale_inv"], both)
    assert found["w2_weight"].view(torch.uint8).equal(saved[f"{name}.down_proj.weight"].view(torch.uint8))


def test_a_user_can_add_a_family(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {f"blocks.layers.{layer}.moe.in": torch.randn(3, 4, 4) for layer in range(2)}
    saved |= {f"blocks.layers.{layer}.moe.out": torch.randn(3, 4, 4) for layer in range(2)}
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no known family"):
        CheckpointReader(tmp_path)
    mine = CheckpointFamily(
        "mine", {"w13_weight": ("layers.{layer}.moe.in",), "w2_weight": ("layers.{layer}.moe.out",)}
    )
    monkeypatch.setitem(FAMILIES, "mine", mine)
    assert torch.equal(read(CheckpointReader(tmp_path), 1, 2)["w2_weight"], saved["blocks.layers.1.moe.out"][2])
    with pytest.raises(ValueError, match=r"needs a .layer"):
        CheckpointFamily("bad", {"w13_weight": ("experts",)})


def fused(layers: int = 2, experts: int = 2) -> dict[str, torch.Tensor]:
    name = "model.layers.{}.mlp.experts.{}"
    parts = ("gate_up_proj", "down_proj")
    return {name.format(layer, part): torch.randn(experts, 4, 4) for layer in range(layers) for part in parts}


def test_only_the_layers_asked_for_are_used(tmp_path: pathlib.Path) -> None:
    saved = fused(3)
    save_file(saved, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path, layers=[2])
    assert torch.equal(read(reader, 0, 1)["w2_weight"], saved["model.layers.2.mlp.experts.down_proj"][1])
    with pytest.raises(ValueError, match="has experts in layers"):
        CheckpointReader(tmp_path, layers=[7])


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors files; name the directory"):
        CheckpointReader(tmp_path)


def test_an_unknown_family_is_refused(tmp_path: pathlib.Path) -> None:
    save_file(fused(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unknown model family"):
        CheckpointReader(tmp_path, "nonesuch")


def test_a_checkpoint_that_lacks_a_tensor_of_an_expert_is_refused(tmp_path: pathlib.Path) -> None:
    saved = fused()
    del saved["model.layers.1.mlp.experts.down_proj"]
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing from the checkpoint"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda whole: whole[:-64], "does not lie where its header says"),
        (lambda whole: (1 << 60).to_bytes(8, "little") + whole[8:], "header cannot be"),
        (lambda whole: whole[:8] + b"x" * (len(whole) - 8), "not JSON"),
    ],
    ids=["shortened", "header too long", "header overwritten"],
)
def test_a_damaged_file_is_refused(tmp_path: pathlib.Path, damage: Callable[[bytes], bytes], complaint: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file(fused(), file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=complaint):
        CheckpointReader(tmp_path)


def test_a_file_that_was_shortened_after_it_was_indexed_is_a_lost_source(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(fused(), file)
    reader = CheckpointReader(tmp_path)
    os.truncate(file, file.stat().st_size - 64)
    with pytest.raises(SourceLost, match="shorter than when it was indexed"):
        [read(reader, layer, expert) for layer in range(2) for expert in range(2)]


def test_a_file_that_was_removed_after_it_was_indexed_is_a_lost_source(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(fused(), file)
    reader = CheckpointReader(tmp_path)
    file.unlink()
    with pytest.raises(SourceLost, match="cannot be read"):
        read(reader, 0, 0)


def test_a_model_that_was_converted_is_told_apart(tmp_path: pathlib.Path) -> None:
    save_file(fused(), tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    with pytest.raises(SourceLost, match="converted"):
        reader.read([Want(0, 0, -1, [torch.zeros(64, dtype=torch.uint8)])])
    with pytest.raises(SourceLost, match="another size"):
        reader.read([Want(0, 0, -1, [torch.zeros(4, dtype=torch.uint8)] * 2)])
