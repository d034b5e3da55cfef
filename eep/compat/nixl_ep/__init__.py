"""NIXL's interface for elastic expert parallelism: ``import eep.compat.nixl_ep as nixl_ep`` takes the place of
``import nixl_ep``. :mod:`eep.compat.nixl_ep.buffer` says what is different."""

from __future__ import annotations

from eep.compat.config import Config
from eep.compat.deep_ep import EventHandle, EventOverlap, topk_idx_t
from eep.compat.nixl_ep.buffer import Buffer

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
