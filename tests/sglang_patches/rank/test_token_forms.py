"""The form in which tokens reach the kernels of the experts, and that the results come back. The kernels are torch's, and
SGLang's types are stand-ins: DeepGEMM and Triton need a GPU. test_targets.py checks that SGLang has such types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import eep
from sglang_patches.rank.dispatcher import TokenExchange, route_tokens
from sglang_patches.rank.token_forms import ExpertKernels, MoeShape, TokenForm, choose_forms

HIDDEN, SLOTS, TOPK, TOKENS = 256, 4, 2, 6
SHAPE = MoeShape(SLOTS, SLOTS, HIDDEN, TOPK, torch.bfloat16)


def layer(*, block: list[int] | None = None, deep_gemm: bool = False) -> Any:
    return SimpleNamespace(
        quant_method=SimpleNamespace(
            runner=SimpleNamespace(runner_backend=SimpleNamespace(is_deep_gemm=lambda: deep_gemm)),
            block_quant=block is not None,
            quant_config=SimpleNamespace(weight_block_size=block),
        )
    )


@pytest.mark.parametrize(
    ("dtype", "block", "expected"),
    [
        (torch.float32, None, TokenForm("f32", "rank")),
        (torch.bfloat16, None, TokenForm("bf16", "rank")),
        (torch.bfloat16, [128, 128], TokenForm("fp8", "rank")),
        (torch.bfloat16, [1, 32], TokenForm("bf16", "rank")),
        (torch.float32, [128, 128], TokenForm("f32", "rank")),
    ],
)
def test_triton_gets_rows_by_rank(dtype: torch.dtype, block: list[int] | None, expected: TokenForm) -> None:
    experts = ExpertKernels.of(layer(block=block), MoeShape(SLOTS, SLOTS, HIDDEN, TOPK, dtype))
    assert choose_forms(experts, 2) == (expected, expected)
    assert choose_forms(experts, 1) == (expected,)


def test_a_method_that_says_nothing_of_itself_gets_rows_as_they_are() -> None:
    assert choose_forms(ExpertKernels.of(SimpleNamespace(quant_method=object()), SHAPE), 1) == (
        TokenForm("bf16", "rank"),
    )


@pytest.mark.parametrize(
    ("block", "exponents", "decode"),
    [(None, False, "bf16"), ([128, 128], False, "fp8"), ([128, 128], True, "fp8_ue8m0")],
)
def test_deep_gemm_gets_rows_by_expert_where_all_decode(
    monkeypatch: pytest.MonkeyPatch, block: list[int] | None, exponents: bool, decode: str
) -> None:
    monkeypatch.setattr("sglang_patches.rank.token_forms._wants_exponents", lambda: exponents)
    experts = ExpertKernels.of(layer(block=block, deep_gemm=True), SHAPE)
    assert choose_forms(experts, 2) == (TokenForm("bf16", "rank"), TokenForm(decode, "expert"))
    assert choose_forms(experts, 1) == (TokenForm("bf16", "rank"),)


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: StandardTopKOutput
    hidden_states_pre_quant: tuple[torch.Tensor, torch.Tensor] | None = None


class DeepEPLLDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int


@pytest.fixture(autouse=True)
def types_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    base = "sglang.srt.layers.moe."
    for name, kind in (
        ("token_dispatcher.standard", StandardDispatchOutput),
        ("token_dispatcher.deepep", DeepEPLLDispatchOutput),
        ("topk", StandardTopKOutput),
    ):
        module = ModuleType(base + name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, base + name, module)
    for package in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.moe"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, base + "token_dispatcher", ModuleType(base + "token_dispatcher"))


def exchange(place: Path, form: TokenForm, run: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes back to a rank that is alone, in two exchanges, and what should. Expert ``e`` multiplies by ``e + 1``."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(SLOTS, generator=generator)[:TOPK] for _ in range(TOKENS)]).to(torch.int32)
    ids[2, 1] = -1
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    buffer = eep.Buffer(
        0,
        rendezvous=place,
        max_ranks=2,
        max_tokens=8,
        hidden=HIDDEN,
        topk=TOPK,
        local_experts=SLOTS,
        layout=form.layout,
        wire=form.wire,
    )
    with buffer:
        buffer.start_alone()
        counted: list[torch.Tensor] = []
        plane: Any = SimpleNamespace(
            choose=lambda layer, column: torch.tensor([-1, *range(SLOTS)])[column],
            count=lambda layer, column: counted.append(column),
            one=torch.ones(1, dtype=torch.int64),
            masks=False,
            buffer=buffer,
            advance=lambda: None,
            run=lambda: None,
        )
        for _ in range(2):
            step = TokenExchange(plane, x, route_tokens(plane, 0, StandardTopKOutput(weights, ids, x)))
            output = step.received(x)
            made = run(output)
            for tensor in (output.hidden_states, output.hidden_states_scale):
                if tensor is not None and tensor is not made:
                    tensor.set_(torch.empty(0, dtype=tensor.dtype))  # as SGLang disposes of what it has read
            got = step.combine(made)
        assert buffer.status().ok
    assert all(torch.equal(each, ids.long() + 1) for each in counted), "what the gate picked is counted"
    factors = torch.where(ids >= 0, weights * (ids + 1), 0.0).sum(dim=1, keepdim=True)
    return got.float(), x.float() * factors


def test_fp8_rows_are_taken_as_they_come_and_results_are_left_where_combine_wants_them(tmp_path: Path) -> None:
    def run(output: StandardDispatchOutput) -> torch.Tensor:
        assert output.hidden_states_pre_quant is not None
        rows, scales = output.hidden_states_pre_quant
        weights, ids, _ = output.topk_output
        assert rows.dtype == torch.float8_e4m3fn
        assert rows.is_contiguous()
        assert scales.shape == (len(rows), HIDDEN // 128)
        plain = rows.float() * scales.repeat_interleave(128, dim=1)
        factors = torch.where(ids >= 0, weights * (ids + 1), 0.0).sum(dim=1, keepdim=True)
        output.hidden_states.copy_(torch.where(factors > 0, plain * factors, 0.0))
        return output.hidden_states

    got, wanted = exchange(tmp_path, TokenForm("fp8", "rank"), run)
    torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_rows_by_expert_come_back_weighted(tmp_path: Path, wire: str) -> None:
    def run(output: DeepEPLLDispatchOutput) -> torch.Tensor:
        x, counts = output.hidden_states, output.masked_m
        assert x.shape == (SLOTS, 2 * 8, HIDDEN)
        assert output.expected_m == TOKENS * TOPK // SLOTS
        plain = x.float()
        if output.hidden_states_scale is not None:
            plain *= output.hidden_states_scale.repeat_interleave(128, dim=2)
        made = torch.zeros(x.shape, dtype=torch.bfloat16)
        for slot, count in enumerate(counts.tolist()):
            made[slot, :count] = plain[slot, :count] * (slot + 1)
        return made

    got, wanted = exchange(tmp_path, TokenForm(wire, "expert"), run)
    torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.05)


def test_kernels_that_take_a_fixed_number_of_experts_get_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_patches.rank.token_forms._wants_exponents", lambda: False)
    shape = replace(SHAPE, open_slots=SLOTS - 1)
    with pytest.raises(SystemExit, match="DeepGEMM takes as many experts as a rank has loaded"):
        ExpertKernels.of(layer(deep_gemm=True), shape).check(shape)
    ExpertKernels.of(layer(), shape).check(shape)
    ExpertKernels.of(layer(deep_gemm=True), SHAPE).check(SHAPE)
