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
