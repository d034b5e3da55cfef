"""The layout of a rank's experts in one region: what it refuses."""

from __future__ import annotations

import pytest
import torch

from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec

SPEC = TensorSpec("w", (2,), torch.float32)


@pytest.mark.parametrize(
    ("layers", "slots", "tensors"),
    [(0, 1, (SPEC,)), (1, 0, (SPEC,)), (1, 1, ())],
    ids=["no layers", "no slots", "no tensors"],
)
def test_a_layout_of_nothing_is_refused(layers: int, slots: int, tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        ExpertLayout(layers, slots, tensors)


def test_tensors_of_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match="must differ"):
        ExpertLayout(1, 1, (SPEC, SPEC))


def test_a_tensor_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="without elements"):
        ExpertLayout(1, 1, (TensorSpec("w", (0,), torch.float32),))


@pytest.mark.parametrize(
    ("region", "complaint"),
    [(torch.zeros(4, dtype=torch.uint8), "the region has 4"), (torch.zeros(4096), "flat, contiguous")],
    ids=["too small", "of another type"],
)
def test_a_region_that_does_not_fit_is_refused(region: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ExpertMemory(ExpertLayout(2, 3, (SPEC,)), region)


@pytest.mark.parametrize(("layer", "slot"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_slot_outside_of_the_layout_is_refused(layer: int, slot: int) -> None:
    with pytest.raises(IndexError):
        ExpertLayout(2, 3, (SPEC,)).pieces(layer, slot)
