"""A random model whose gates like some experts better than others."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from eep.drill.models.checkpoint import write_model
from eep.drill.models.model_sizes import Size

# Most of the work is that of experts.
SIZE = Size(16, 4, 4, 256, 1024, 4, 2, 64, spread=0.1)
_GATE = re.compile(r"\.mlp\.gate\.weight$")


def make_skewed_model(folder: Path, favour: float) -> Path:
    """The scores of the first half of the experts spread ``favour`` times as wide as those of the others, and the widest are
    picked. Where experts are placed in their order, half of the ranks have them."""
    write_model(folder, SIZE)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    for name, gate in tensors.items():
        if _GATE.search(name):
            gate[: SIZE.experts // 2] *= favour
    save_file(tensors, file, metadata)
    return folder
