"""A random model whose gates like the experts of one rank better than others."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from eep.drill.models.checkpoint import write_model
from eep.drill.models.model_sizes import Size
from eep.experts.placement.packing import find_owned
from sglang_patches.rank.expert_location import initial_placement

# Most of the work is that of experts.
SIZE = Size(16, 4, 4, 256, 2048, 4, 2, 64, spread=0.1)
_GATE = re.compile(r"\.layers\.(\d+)\.mlp\.gate\.weight$")


def held_by_first_alone(ranks: int, slots: int) -> list[list[int]]:
    """Of each layer: the experts that rank 0 of a server has when it starts, and no other rank. Placements deal experts out
    in turns, and in another order in each layer, so these are not the first ones."""
    placement = initial_placement(SIZE.layers, SIZE.experts, slots, ranks, ranks)
    owned = find_owned(placement.physical_to_logical, SIZE.experts, slots)
    return [alone.nonzero()[0].tolist() for alone in owned[:, 0] & (owned.sum(axis=1) == 1)]


def make_skewed_model(folder: Path, favour: float, favoured: list[list[int]]) -> Path:
    """In each layer the scores of the ``favoured`` experts spread ``favour`` times as wide as those of the others, and the
    widest are picked."""
    write_model(folder, SIZE)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    for name, gate in tensors.items():
        if found := _GATE.search(name):
            gate[favoured[int(found[1])]] *= favour
    save_file(tensors, file, metadata)
    return folder
