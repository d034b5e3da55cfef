"""What a buffer is made for: how many ranks, how large a batch, and how tokens travel. All ranks must agree on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eep.abi.native import LAYOUTS, TYPES, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """Checked when it is made: ``ValueError`` names the argument that is wrong."""

    max_ranks: int
    max_tokens: int
    """Per rank and dispatch."""
    hidden: int
    topk: int
    local_experts: int
    layout: str = "rank"
    wire: str = "bf16"
    combine: str | None = None
    """``fp8``: what the experts give travels back encoded. None: as they give it."""
    channels: int = 1

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("wire", self.wire, TYPES)
        if self.combine is not None:
            check_choice("combine", self.combine, {"fp8": TYPES["fp8"]})
            if self.wire == "f32":
                raise ValueError("combine='fp8' is for outputs of bf16, but those of a buffer with wire='f32' are f32")
        for name in ("max_ranks", "max_tokens", "hidden", "topk", "local_experts"):
            if not 0 < (size := getattr(self, name)) < 2**31:
                raise ValueError(f"{name} must be positive, got {size}")
        if self.channels < 1:
            raise ValueError(f"channels must be positive, got {self.channels}")

    @property
    def combine_type(self) -> str:
        """How what the experts give travels back."""
        return self.combine or ("f32" if self.wire == "f32" else "bf16")

    @property
    def combine_dtype(self) -> torch.dtype:
        """What the experts give, and what a combine returns."""
        return torch.float32 if self.wire == "f32" else torch.bfloat16

    def native(self) -> Shape:
        """The same as the library takes it."""
        return Shape(
            max_ranks=self.max_ranks,
            max_tokens=self.max_tokens,
            hidden=self.hidden,
            max_topk=self.topk,
            local_experts=self.local_experts,
            layout=LAYOUTS[self.layout],
            wire_type=TYPES[self.wire],
            combine_type=TYPES[self.combine_type],
            channels=self.channels,
        )


def check_choice(name: str, value: str, choices: dict[str, int]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
