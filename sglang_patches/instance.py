"""This rank's part of the instance: one per scheduler process, made while SGLang builds the model.

SGLang builds its layers one by one; each MoE layer announces itself here. Once the weights are loaded, :meth:`Instance.start`
brings up the data plane and, where a supervisor started this process, the session that keeps the instance valid.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eep.buffer import Buffer
from eep.control.private import CONTROL_DIRECTORY
from eep.experts.placement import Placement
from sglang_patches import options
from sglang_patches.arguments import RENDEZVOUS
from sglang_patches.expert_location import ExpertLocation, initial_placement
from sglang_patches.session import FixedSession, Session


@dataclass(frozen=True)
class MoeShape:
    """What all MoE layers of a model have in common."""

    experts: int
    slots_per_rank: int
    hidden: int
    topk: int
    dtype: torch.dtype


@dataclass
class Instance:
    rank: int
    ranks: int
    max_tokens: int
    device: str
    options: options.Options = field(default_factory=options.required)
    shape: MoeShape | None = None
    layers: list[int] = field(default_factory=list)
    """The layer ids of SGLang, in the order of the layers of the placement."""
    _buffer: Buffer | None = None
    _session: Session | None = None

    def add_layer(self, layer_id: int, shape: MoeShape) -> int:
        """The index of an MoE layer in the placement."""
        if self.shape is not None and shape != self.shape:
            raise SystemExit(f"--ep-backend eep needs MoE layers of one kind; this model has {self.shape} and {shape}")
        if "location" in self.__dict__:
            raise RuntimeError("experts were placed before all MoE layers were there")
        self.shape = shape
        self.layers.append(layer_id)
        return len(self.layers) - 1

    @cached_property
    def location(self) -> ExpertLocation:
        return ExpertLocation(self.first_placement, self.rank, self.device)

    @cached_property
    def first_placement(self) -> Placement:
        """What every rank loads when it starts."""
        if self.shape is None:
            raise SystemExit("--ep-backend eep serves models with experts; this one has none")
        return initial_placement(
            len(self.layers), self.shape.experts, self.shape.slots_per_rank, self.ranks, self.options.max_ranks
        )

    @property
    def buffer(self) -> Buffer:
        if self._buffer is None:
            raise RuntimeError("the data plane is not up before the weights are loaded")
        return self._buffer

    @property
    def session(self) -> Session:
        if self._session is None:
            raise RuntimeError("there is no session before the weights are loaded")
        return self._session

    @property
    def is_started(self) -> bool:
        return self._session is not None

    def start(self) -> None:
        """Bring up the data plane of this rank and its session."""
        shape = self.shape
        assert shape is not None
        supervised = CONTROL_DIRECTORY in os.environ
        rendezvous = Path(os.environ[CONTROL_DIRECTORY], "r") if supervised else Path(os.environ[RENDEZVOUS])
        self._buffer = Buffer(
            self.rank,
            rendezvous=rendezvous,
            max_ranks=self.options.max_ranks,
            max_tokens=self.max_tokens,
            hidden=shape.hidden,
            topk=shape.topk,
            local_experts=shape.slots_per_rank,
            wire="f32" if shape.dtype == torch.float32 else "bf16",
            device=self.device,
            incarnation=int(os.environ["EEP_INCARNATION"]) if supervised else None,
            timeout_ms=self.options.timeout_ms,
        )
        self._session = _supervised_session(self) if supervised else FixedSession(self._buffer, self.ranks)


_current: Instance | None = None


def current() -> Instance:
    """The instance of this process; made at the first call, once SGLang has published its configuration."""
    global _current
    if _current is None:
        from sglang.srt.runtime_context import get_parallel, get_schedule, get_server_args

        parallel = get_parallel()
        _current = Instance(
            rank=parallel.tp_rank,
            ranks=parallel.tp_size,
            max_tokens=largest_step(get_schedule()),
            device=str(get_server_args().device or "cpu"),
        )
    return _current


def is_started() -> bool:
    """Whether this process has an instance that serves."""
    return _current is not None and _current.is_started


def largest_step(schedule: Any) -> int:
    """The most tokens that a rank can have in one step: a chunk of prefill together with every running request."""
    chunk, running = schedule.chunked_prefill_size, schedule.max_running_requests
    if not chunk or chunk < 0:
        raise SystemExit("--ep-backend eep needs chunked prefill: set --chunked-prefill-size")
    return int(chunk) + int(running or 0)


def _supervised_session(instance: Instance) -> Session:
    from eep.recovery import connect

    return connect(instance)
