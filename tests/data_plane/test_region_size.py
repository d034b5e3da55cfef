"""How much memory the exchange takes: sums that agree with what the library lays out, and how many tokens a region is for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eep
from eep.abi import native
from eep.abi.native import MAX_TOKENS, RegionLayout
from eep.data_plane.buffer_shape import BufferShape
from eep.data_plane.region_size import LEAST_PORTION, MOST_REGION, choose_room, mirror_bytes, packed_bytes, region_bytes
from tests import moe


def deepseek(ranks: int, tokens: int, layout: str = "rank") -> BufferShape:
    return BufferShape(max_ranks=ranks, max_tokens=tokens, hidden=7168, topk=8, local_experts=8, layout=layout)


@st.composite
def shapes(draw: st.DrawFn) -> BufferShape:
    wire = draw(st.sampled_from(("f32", "bf16", "fp8", "fp8_pow2", "fp8_ue8m0")))
    combine = None if wire == "f32" else draw(st.sampled_from((None, "fp8")))
    in_groups = wire.startswith("fp8") or combine == "fp8"
    return BufferShape(
        max_ranks=draw(st.integers(1, 512)),
        max_tokens=draw(st.integers(1, 70)),
        hidden=128 * draw(st.integers(1, 5)) if in_groups else draw(st.integers(1, 700)),
        topk=draw(st.integers(1, 16)),
        local_experts=draw(st.integers(1, 9)),
        layout=draw(st.sampled_from(("rank", "expert"))),
        wire=wire,
        combine=combine,
        channels=draw(st.integers(1, 2)),
    )


@given(shape=shapes())
def test_a_region_is_as_large_as_the_library_lays_it_out(shape: BufferShape) -> None:
    library, layout = native.load(), RegionLayout()
    native.check(library, library.eep_region_layout_compute(shape.native(), layout))
    assert region_bytes(shape) == layout.total_bytes
    outbox = layout.outbox_row_bytes * (1 if shape.layout == "rank" else shape.topk)
    token = 8 * shape.topk + outbox
    assert mirror_bytes(shape) == shape.channels * shape.max_tokens * token, "routing there, and what comes back"


@pytest.mark.parametrize("combine", [None, "fp8"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_what_a_buffer_holds_beside_its_region(rendezvous: eep.Rendezvous, layout: str, combine: str | None) -> None:
    config = moe.Config(max_ranks=5, max_tokens=64, layout=layout, wire="fp8", combine=combine, local_experts=3)
    with config.buffer(0, rendezvous) as buffer:
        tensors = vars(buffer._tensors[0])
        outputs = tensors["outputs"].nbytes if layout == "expert" or combine else 0
        held = outputs + sum(
            each.nbytes for name, each in tensors.items() if isinstance(each, torch.Tensor) and name != "outputs"
        )
        shape = BufferShape(
            max_ranks=5,
            max_tokens=64,
            hidden=config.hidden,
            topk=config.topk,
            local_experts=3,
            layout=layout,
            wire="fp8",
            combine=combine,
        )
        small = 4 * 5 + 4 * 3 + 8 * 3 * 5
        """Counts of ranks and experts, and the ranges."""
        assert packed_bytes(shape) <= held <= packed_bytes(shape) + small


def test_by_default_a_region_has_room_for_a_whole_step_unless_it_would_be_larger_than_the_bound() -> None:
    def room(ranks: int, most: int) -> int:
        return choose_room(most, None, lambda tokens: region_bytes(deepseek(ranks, tokens)))

    assert room(8, 8192 + 256) == 8192 + 256, "one host of eight GPUs keeps what it has"
    assert room(64, 128) == 128
    for ranks in (32, 64, 256):
        found = room(ranks, 8192 + 256)
        assert LEAST_PORTION <= found < 8192
        assert region_bytes(deepseek(ranks, found)) <= MOST_REGION < region_bytes(deepseek(ranks, found + 1))
    assert room(4096, 8192) == LEAST_PORTION, "experts would have nothing to do"
    assert room(4096, 100) == 100


def test_an_operator_chooses_how_many_tokens_a_region_is_for() -> None:
    assert choose_room(4352, 64, _never) == 64
    assert choose_room(40, 64, _never) == 40
    assert choose_room(10**6, None, lambda _: 0) == MAX_TOKENS, "a flag cannot count more"


def _never(_: int) -> int:
    raise AssertionError("it does not matter how large the region is")
