"""The form in which tokens cross ranks and reach the kernels of the experts. Decisions only.

========================= =========== ====================================================================================
experts                   kernels     tokens
========================= =========== ====================================================================================
float32, bfloat16         Triton      as they are, by rank; the kernel looks for the rows of each expert
fp8 in blocks of 128      Triton      fp8, by rank: quantised once, where they are sent, and taken by the kernel as they come
any                       DeepGEMM    decode: by expert, which is how its masked kernel wants them, in fp8 if the experts are;
                                      other steps: as they are, by rank, since by expert there would have to be room for
                                      every token at every expert
========================= =========== ====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eep.abi.native import SCALE_GROUP


@dataclass(frozen=True)
class MoeShape:
    """What all MoE layers of a model have in common."""

    experts: int
    slots_per_rank: int
    hidden: int
    topk: int
    dtype: torch.dtype
    open_slots: int = 0
    """How many of the slots usually have memory; 0: all of them, always."""

    @property
    def loaded_slots(self) -> int:
        """How many slots of a rank SGLang loads."""
        return self.open_slots or self.slots_per_rank


@dataclass(frozen=True)
class TokenForm:
    wire: str
    layout: str

    def __str__(self) -> str:
        return f"{self.wire} by {self.layout}"


class _MoeLayer(Protocol):
    quant_method: Any


@dataclass(frozen=True)
class ExpertKernels:
    """The properties of the experts and their kernels that decide the form."""

    plain: str
    """The element type of tokens that are not quantised."""
    in_blocks: bool
    """Whether their weights are fp8, and want tokens in fp8 with a scale for each 128 values."""
    deep_gemm: bool
    exponents: bool
    """Whether DeepGEMM wants scales as exponents, as it does from Blackwell on."""

    @classmethod
    def of(cls, layer: _MoeLayer, shape: MoeShape) -> ExpertKernels:
        method = layer.quant_method
        runner = getattr(getattr(method, "runner", None), "runner_backend", None)
        deep_gemm = bool(runner is not None and runner.is_deep_gemm())
        block = getattr(getattr(method, "quant_config", None), "weight_block_size", None)
        return cls(
            plain="f32" if shape.dtype == torch.float32 else "bf16",
            in_blocks=bool(getattr(method, "block_quant", False))
            and list(block or ()) == [SCALE_GROUP, SCALE_GROUP]
            and shape.hidden % SCALE_GROUP == 0
            and shape.dtype == torch.bfloat16,
            deep_gemm=deep_gemm,
            exponents=deep_gemm and _wants_exponents(),
        )

    def check(self, shape: MoeShape) -> None:
        """SystemExit if these kernels cannot do what is asked of them."""
        if self.deep_gemm and shape.open_slots:
            raise SystemExit(
                "--eep-on-lost-coverage make-room: DeepGEMM takes as many experts as a rank has loaded, and no more later; "
                "use --moe-runner-backend triton, refuse or mask"
            )


def choose_forms(experts: ExpertKernels, buffers: int) -> tuple[TokenForm, ...]:
    """The forms for each buffer: the one for any step, and the one for decode if there is one."""
    plain = TokenForm(experts.plain, "rank")
    if not experts.deep_gemm:
        return (TokenForm("fp8", "rank") if experts.in_blocks else plain,) * buffers
    quantised = "fp8_ue8m0" if experts.exponents else "fp8"
    decode = TokenForm(quantised if experts.in_blocks else experts.plain, "expert")
    return (plain, decode)[:buffers]


def _wants_exponents() -> bool:
    from sglang.srt.layers import deep_gemm_wrapper

    return bool(deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0)
