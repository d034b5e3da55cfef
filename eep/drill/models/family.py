"""What makes a family of models, for those that write a checkpoint of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eep.drill.models.model_sizes import Size


def leave_as_it_is(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Family:
    architecture: str
    """As transformers and SGLang call it."""
    settings: Callable[[Size], dict[str, Any]]
    """What its configuration says beside what all families say."""
    fill: Callable[[Any], None] = leave_as_it_is
    """Gives random values to what transformers makes zero, or so small that no answer depends on it."""
    has_block_fp8: bool = True
    """Whether its experts are published in fp8 too."""

    @property
    def configuration(self) -> str:
        """The name of the class of its configuration."""
        return self.architecture.removesuffix("ForCausalLM") + "Config"


def fill_biases(model: Any, spread: float = 0.2) -> None:
    """Random biases: of linear layers, of experts, and those that correct the scores of a gate."""
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias"):
            each.data.normal_(0.0, spread)
