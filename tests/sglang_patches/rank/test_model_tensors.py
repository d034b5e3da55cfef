"""The tensors of a model move into one region, and a model without memory gets them from there."""

from __future__ import annotations

import pytest
import torch

from sglang_patches.rank.weights.model_tensors import (
    LARGE,
    TensorList,
    Unfit,
    WithoutMemory,
    bind,
    fill,
    find_scalars,
    lay_out,
    verify,
)

WIDE = LARGE // 4 // 16


class Marked(torch.nn.Parameter):
    """SGLang has parameters of its own kinds."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Module()
        self.embed.weight = Marked(torch.empty(WIDE, 16), requires_grad=False)
        self.embed.weight.weight_loader = "its loader"  # type: ignore[attr-defined]
        self.head = torch.nn.Module()
        self.head.weight = self.embed.weight
        self.small = torch.nn.Parameter(torch.empty(3), requires_grad=False)
        self.register_buffer("angles", torch.arange(7, dtype=torch.float64))
        self.transposed = torch.empty(16, WIDE).t()
        self.part = self.transposed[4:6]
        self.scale = 1.0


def loaded() -> Model:
    model = Model()
    torch.manual_seed(1)
    for tensor in (model.embed.weight, model.small, model.transposed):
        tensor.data.normal_()
    model.scale = 0.25
    return model


def kept(model: Model) -> tuple[TensorList, torch.Tensor]:
    listed = lay_out(model, (), "cpu")
    region = torch.zeros(listed.region_bytes, dtype=torch.uint8)
    fill(listed, region, model)
    return listed, region


def test_a_model_without_memory_gets_that_of_another() -> None:
    first = loaded()
    listed, region = kept(first)
    verify(listed, region)
    with WithoutMemory():
        second = Model()
    assert second.embed.weight.is_meta
    assert not second.small.is_meta
    head = second.head.weight
    bind(listed, region, second)
    assert second.head.weight is head is second.embed.weight, "tied weights stay tied"
    assert type(head) is Marked
    assert head.weight_loader == "its loader"
    for name in ("embed.weight", "small", "angles", "transposed", "part"):
        module, _, attribute = name.rpartition(".")
        mine, theirs = (getattr(each.get_submodule(module), attribute) for each in (second, first))
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
    second.transposed[4, 0] = 7
    assert second.part[0, 0] == 7, "a view stays one"
    assert lay_out(second, (), "cpu") != listed
    assert find_scalars(first)[""]["scale"] == 0.25


def test_a_model_moves_into_the_region_itself() -> None:
    model = loaded()
    listed, region = kept(model)
    before = model.embed.weight.clone()
    bind(listed, region, model)
    assert torch.equal(model.embed.weight, before)
    region.zero_()
    assert not model.embed.weight.any()


def test_what_was_changed_is_noticed() -> None:
    listed, region = kept(loaded())
    tied = next(each for each in listed.tensors if each.module == "embed")
    region[listed.storages[tied.storage].start + 5] ^= 1
    with pytest.raises(Unfit, match=r"embed.weight, head.weight is not as it was loaded"):
        verify(listed, region)


def test_what_does_not_fit_is_refused() -> None:
    listed, region = kept(loaded())

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Parameter(torch.empty(WIDE, 16), requires_grad=False)

    with WithoutMemory():
        other = Other()
    with pytest.raises(Unfit, match=r"more of 1 tensors have no memory"):
        bind(listed, region, other)
    with pytest.raises(Unfit, match="no tensor small"):
        bind(listed, region, torch.nn.Linear(2, 2))


def test_lists_of_the_same_content_have_the_same_digest() -> None:
    first, second = loaded(), loaded()
    assert lay_out(first, (), "cpu").digest == lay_out(second, (), "cpu").digest
    second.small.data[0] += 1
    assert lay_out(first, (), "cpu").digest != lay_out(second, (), "cpu").digest
