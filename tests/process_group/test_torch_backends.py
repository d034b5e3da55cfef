"""By which names torch is asked for groups of the backend, alone and with others beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import eep


@contextlib.contextmanager
def default_group(backend: str, **options: object) -> Iterator[None]:
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, pg_options=eep.pg.Options(**options) if options else None
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["eep", "EEP", "cpu:eep", "cpu:eep,cuda:eep"])
def test_alone(backend: str) -> None:
    with default_group(backend):
        assert eep.pg.get_active_ranks(dist.group.WORLD) == (0,)


@pytest.mark.parametrize("backend", ["cpu:eep,cuda:nccl", "cpu:eep,cuda:gloo", "cpu:gloo,cuda:eep"])
def test_beside_another_it_is_refused(backend: str) -> None:
    """Torch would make no group of the other."""
    with pytest.raises(ValueError, match=r"none of (nccl for cuda|gloo for cuda|gloo for cpu): ask for 'eep'"):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_another_has_a_group_of_its_own() -> None:
    with default_group("eep"):
        with pytest.raises(ValueError, match="none of gloo for cuda"):
            dist.new_group([0], backend="cpu:eep,cuda:gloo")
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0], backend="gloo"))
        dist.all_reduce(total, group=dist.new_group([0], backend="cpu:eep"))
        assert total.item() == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with (
        pytest.raises(ValueError, match="torch finds none; leave out 'cuda'"),
        default_group("eep", devices=("cpu", "cuda")),
    ):
        pass
    with default_group("eep"), pytest.raises(eep.EepError, match="has no backend for cuda"):
        dist.group.WORLD._get_backend("cuda")
