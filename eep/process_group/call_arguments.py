"""How torch hands over the arguments of a call: options as an object or by keyword, tensors in lists.

It depends on the method, and on the version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

_NONE = timedelta(0)


def list_tensors(tensors: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def list_blocks(name: str, blocks: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The tensors of a call, one for each of the ``count`` ranks of the group."""
    if len(blocks) != count:
        raise ValueError(f"{name} needs one tensor for each of the {count} ranks of the group, got {len(blocks)}")
    return list(blocks)


def list_blocks_of_root(
    name: str, given: Sequence[Sequence[torch.Tensor]], count: int, *, is_root: bool
) -> list[torch.Tensor]:
    """Those of a call for which only the root has such tensors."""
    if is_root:
        return list_blocks(name, given[0] if given else [], count)
    if any(len(blocks) for blocks in given):
        raise ValueError(f"{name}: only the root gives a tensor for each rank")
    return []


def take_one_tensor(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of a call, called ``name``, that takes one."""
    if len(tensors) != 1:
        raise ValueError(f"{name} takes one tensor at a time, got {len(tensors)}")
    return tensors[0]


def choose_option(opts: Any, given: dict[str, Any], name: str, keyword: str, default: Any) -> Any:
    """What the caller chose: the attribute ``name`` of its options, or ``keyword`` among what was ``given`` by keyword."""
    return getattr(opts, name) if hasattr(opts, name) else given.get(keyword, default if opts is None else opts)


def choose_timeout(opts: Any, default: float) -> float:
    """The seconds that a call may take."""
    timeout = getattr(opts, "timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) and timeout > _NONE else default
