"""What this rank knows of the model and of its own place: its number and device, the MoE layers, the first placement.

SGLang builds its layers one by one, and each MoE layer announces itself here. Nothing here changes once the model is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from eep.experts.placement.open_slots import widen
from eep.experts.placement.slot_plan import Placement
from sglang_patches import options
from sglang_patches.rank import step_sizes
from sglang_patches.rank.expert_location import experts_in_slots, initial_placement
from sglang_patches.rank.token_forms import MoeShape


@dataclass
class ModelFacts:
    rank: int
    device: str
    max_tokens: tuple[int, ...]
    """The most tokens that a rank can have in a step, for each buffer: any step, and one in which all ranks decode."""
    options: options.ServerOptions
    shape: MoeShape | None = None
    layer_ids: list[int] = field(default_factory=list)
    """SGLang's numbers of the MoE layers, in the order of the layers of the placement."""

    def add_layer(self, layer_id: int, shape: MoeShape) -> int:
        """The index of an MoE layer in the placement."""
        if self.shape is not None and shape != self.shape:
            raise SystemExit(
                f"--ep-backend eep: the MoE layers of this model differ ({self.shape} and {shape}), and eep serves models "
                "whose MoE layers are all alike; serve this one without --ep-backend eep"
            )
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise SystemExit(
                f"--ep-backend eep: tokens cross ranks in float32 or bfloat16, and this model is in {shape.dtype}; "
                "use --dtype bfloat16"
            )
        if "first_placement" in self.__dict__:
            raise RuntimeError(
                f"MoE layer {layer_id} was built after the experts were placed: SGLang loads before it builds"
            )
        self.shape = shape
        self.layer_ids.append(layer_id)
        return len(self.layer_ids) - 1

    @property
    def moe_shape(self) -> MoeShape:
        """The shape that all MoE layers share; SystemExit if the model has none."""
        if self.shape is None:
            raise SystemExit(
                "--ep-backend eep: this model has no experts, and eep serves models that have; serve it without "
                "--ep-backend eep"
            )
        return self.shape

    @cached_property
    def first_placement(self) -> Placement:
        """What every rank loads when it starts."""
        shape = self.moe_shape
        hosts = [self.options.host_of(rank) for rank in range(self.options.max_ranks)]
        loaded = initial_placement(
            len(self.layer_ids), shape.experts, shape.loaded_slots, self.options.ranks, len(hosts), hosts
        )
        return widen(loaded, shape.slots_per_rank)

    def experts_to_load(self, layer_id: int) -> list[int]:
        """The expert that each slot of this rank starts with, in the layer that SGLang calls ``layer_id``."""
        held = experts_in_slots(self.first_placement, self.rank, self.layer_ids.index(layer_id))
        return held[: self.moe_shape.loaded_slots]


_facts: ModelFacts | None = None


def get_facts() -> ModelFacts:
    """The facts of this process. The first call needs SGLang to have published its configuration."""
    global _facts
    if _facts is None:
        _facts = _ask_sglang()
    return _facts


def _ask_sglang() -> ModelFacts:
    from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_server_args

    parallel = get_parallel()
    device = str(get_server_args().device or "cpu")
    largest = [step_sizes.largest_step(get_schedule())]
    if device != "cpu":
        running = step_sizes.running_at_once(get_schedule(), parallel)
        largest.append(step_sizes.largest_decode(get_exec().graph.cuda_graph_config.decode, running))
    return ModelFacts(parallel.tp_rank, device, tuple(filter(None, largest)), options.required())
