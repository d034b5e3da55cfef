"""How the checkpoints of model families name their experts. A table, so that a user can add a family.

Kernels hold some tensors of an expert in one: ``w13_weight`` is gate and up. Each is made of the tensors of the
checkpoint that its patterns name, one after the other. ``{layer}`` and ``{expert}`` stand for numbers. A
pattern without ``{expert}`` names a fused tensor whose first dimension counts the experts. A tensor whose
patterns match nothing is not part of that checkpoint (scales of a model that is not quantised). Any prefix
may come before the name, as in ``language_model.model.layers...``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointFamily:
    name: str
    tensors: Mapping[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()
    """Matrices with a row for each input, where the kernels want a row for each output."""

    def __post_init__(self) -> None:
        for tensor, patterns in self.tensors.items():
            if not patterns or any("{layer}" not in pattern for pattern in patterns):
                raise ValueError(f"every pattern of {tensor} in family {self.name} needs a {{layer}}")


def _split(name: str, prefix: str, gate: str, up: str, down: str) -> CheckpointFamily:
    """A family with one tensor per expert and projection, and block scales where it is quantised to fp8."""
    expert = f"layers.{{layer}}.{prefix}.experts.{{expert}}"
    tensors = {
        f"{ours}_{kind}": tuple(f"{expert}.{part}.{kind}" for part in parts)
        for kind in ("weight", "weight_scale_inv")
        for ours, parts in (("w13", (gate, up)), ("w2", (down,)))
    }
    return CheckpointFamily(name, tensors)


FAMILIES: dict[str, CheckpointFamily] = {
    family.name: family
    for family in (
        _split("deepseek", "mlp", "gate_proj", "up_proj", "down_proj"),
        _split("qwen-moe", "mlp", "gate_proj", "up_proj", "down_proj"),
        _split("mixtral", "block_sparse_moe", "w1", "w3", "w2"),
        CheckpointFamily(
            "gpt-oss",
            {
                "w13_weight": ("layers.{layer}.mlp.experts.gate_up_proj_blocks",),
                "w13_weight_scale": ("layers.{layer}.mlp.experts.gate_up_proj_scales",),
                "w13_weight_bias": ("layers.{layer}.mlp.experts.gate_up_proj_bias",),
                "w2_weight": ("layers.{layer}.mlp.experts.down_proj_blocks",),
                "w2_weight_scale": ("layers.{layer}.mlp.experts.down_proj_scales",),
                "w2_weight_bias": ("layers.{layer}.mlp.experts.down_proj_bias",),
            },
        ),
        CheckpointFamily(
            "fused",
            {
                "w13_weight": ("layers.{layer}.mlp.experts.gate_up_proj",),
                "w13_weight_bias": ("layers.{layer}.mlp.experts.gate_up_proj_bias",),
                "w2_weight": ("layers.{layer}.mlp.experts.down_proj",),
                "w2_weight_bias": ("layers.{layer}.mlp.experts.down_proj_bias",),
            },
            transposed=frozenset({"w13_weight", "w2_weight"}),
        ),
    )
}
"""The families that are known. ``FAMILIES[family.name] = family`` adds one."""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression with the groups ``layer`` and perhaps ``expert``."""
    escaped = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
    return re.compile(rf"(?:.*\.)?{escaped}")


def detect_family(names: Iterable[str]) -> CheckpointFamily:
    """The first family of the table whose ``w13_weight`` and ``w2_weight`` are all among ``names``."""
    names = list(names)
    for family in FAMILIES.values():
        needed = [p for t in ("w13_weight", "w2_weight") for p in family.tensors.get(t, ())]
        if needed and all(any(compile_pattern(pattern).fullmatch(name) for name in names) for pattern in needed):
            return family
    raise ValueError(
        f"the names of this checkpoint's experts fit no known family ({', '.join(FAMILIES)}): "
        "add one to eep.experts.checkpoint.families.FAMILIES"
    )
