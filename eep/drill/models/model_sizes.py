"""How large a random model is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    experts: int
    top_k: int
    layers: int
    hidden: int
    moe_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    spread: float
    """Standard deviation of the weights. Wider than usual, so that the answers vary and a single wrong expert changes most
    of them; narrower as sums get longer, so that they do not grow from layer to layer."""

    def __str__(self) -> str:
        return f"{self.experts} experts, top-{self.top_k}, {self.layers} layers, hidden {self.hidden}"


SIZES = {
    # 15 MB, for a CPU.
    "tiny": Size(16, 4, 4, 256, 128, 4, 2, 64, spread=0.2),
    # 140 MB: made and loaded in seconds, for drills on a GPU.
    "small": Size(16, 4, 4, 1024, 256, 8, 4, 128, spread=0.1),
    # 2.6 GB, and three times that in memory while it is made: work enough for a GPU to be measured with.
    "large": Size(32, 8, 8, 2048, 768, 16, 4, 128, spread=0.07),
}
