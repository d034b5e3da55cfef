"""This rank's part of the instance: one per scheduler process, made while SGLang builds the model.

SGLang builds its layers one by one; each MoE layer announces itself here. Once the weights are loaded, :meth:`Instance.start`
brings up the data plane with this rank alone in it. The rank joins at the first boundary of a step, when everything else
that SGLang prepares is done too.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eep.buffer import Buffer
from eep.control.buffer_plane import member_rendezvous
from eep.control.processes import INCARNATION
from eep.experts.checkpoint import CheckpointReader
from eep.experts.converted import ConvertedReader
from eep.experts.coverage import Coverage
from eep.experts.layout import ExpertLayout
from eep.experts.placement import Placement
from eep.experts.repair import Reader
from eep.experts.repair_plan import Tier
from eep.observe.metrics import RankMetrics
from eep.recovery import Session
from eep.view import View
from sglang_patches import options, process_groups
from sglang_patches.expert_location import ExpertLocation, initial_placement

if TYPE_CHECKING:
    from sglang_patches.weights import ExpertWeights

logger = logging.getLogger(__name__)


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
    layer_ids: list[int] = field(default_factory=list)
    """SGLang's numbers of the MoE layers, in the order of the layers of the placement."""
    layers: list[Any] = field(default_factory=list)
    """The MoE layers themselves, once the model is loaded."""
    weights: ExpertWeights | None = None
    checkpoint: Path = Path()
    _buffer: Buffer | None = None
    _session: Session | None = None

    def add_layer(self, layer_id: int, shape: MoeShape) -> int:
        """The index of an MoE layer in the placement."""
        if self.shape is not None and shape != self.shape:
            raise SystemExit(f"--ep-backend eep needs MoE layers of one kind; this model has {self.shape} and {shape}")
        if "first_placement" in self.__dict__:
            raise RuntimeError("experts were placed before all MoE layers were there")
        self.shape = shape
        self.layer_ids.append(layer_id)
        return len(self.layer_ids) - 1

    @cached_property
    def first_placement(self) -> Placement:
        """What every rank loads when it starts."""
        if self.shape is None:
            raise SystemExit("--ep-backend eep serves models with experts; this one has none")
        return initial_placement(
            len(self.layer_ids), self.shape.experts, self.shape.slots_per_rank, self.ranks, self.options.max_ranks
        )

    @cached_property
    def location(self) -> ExpertLocation:
        return ExpertLocation(self.first_placement, self.rank, self.device)

    @property
    def buffer(self) -> Buffer:
        if self._buffer is None:
            raise RuntimeError("the data plane is not up before the weights are loaded")
        return self._buffer

    @property
    def has_joined(self) -> bool:
        """Whether this rank has asked to be let in."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """Asking for it the first time means: this rank is ready."""
        if self._session is None:
            self._session = Session(process_groups.world(), self.buffer, self._repair)
        return self._session

    def _repair(self, view: View) -> int | None:
        digest = self.coverage.repair(view)
        brought_in = {tier.name.lower(): self.coverage.brought_in[tier] for tier in Tier}
        self._metrics.tell(self.session.repeated, brought_in)
        return digest

    def start(self, layers: list[Any], weights: ExpertWeights, checkpoint: Path) -> None:
        """The weights are there: bring up the data plane, with this rank alone in it."""
        shape = self.shape
        assert shape is not None
        self.layers, self.weights, self.checkpoint = layers, weights, checkpoint
        self._buffer = Buffer(
            self.rank,
            rendezvous=member_rendezvous() / "tokens",
            max_ranks=self.options.max_ranks,
            max_tokens=self.max_tokens,
            hidden=shape.hidden,
            topk=shape.topk,
            local_experts=shape.slots_per_rank,
            wire="f32" if shape.dtype == torch.float32 else "bf16",
            device=self.device,
            incarnation=int(os.environ[INCARNATION]),
            timeout_ms=self.options.timeout_ms,
        )
        self._buffer.start_alone()

    def run_empty(self) -> None:
        """A step without tokens of this rank's own: its experts serve those of the others."""
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        shape = self.shape
        assert shape is not None
        with torch.no_grad():
            x = torch.empty((0, shape.hidden), dtype=shape.dtype, device=self.device)
            ids = torch.empty((0, shape.topk), dtype=torch.int32, device=self.device)
            weights = torch.empty((0, shape.topk), dtype=torch.float32, device=self.device)
            for layer in self.layers:
                layer(x, StandardTopKOutput(weights, ids, x))

    @cached_property
    def _metrics(self) -> RankMetrics:
        return RankMetrics(self.rank)

    @cached_property
    def coverage(self) -> Coverage:
        """What keeps every expert on an active rank."""
        weights = self.weights
        assert weights is not None
        return Coverage(
            self.rank,
            int(os.environ[INCARNATION]),
            self.first_placement,
            weights.memory,
            weights.shared,
            weights.checksums,
            member_rendezvous() / "experts",
            self.location.publish,
            checkpoint=_open_checkpoint(self.checkpoint, weights.memory.layout, self.layer_ids),
            when_short=self.options.on_lost_coverage,
            device=self.device,
        )


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


def largest_step(schedule: Any) -> int:
    """The most tokens that a rank can have in one step: a chunk of prefill together with every running request."""
    chunk, running = schedule.chunked_prefill_size, schedule.max_running_requests
    if not chunk or chunk < 0:
        raise SystemExit("--ep-backend eep needs chunked prefill: set --chunked-prefill-size")
    if not running:
        raise SystemExit("--ep-backend eep needs to know how many requests may run at once: set --max-running-requests")
    return int(chunk) + int(running)


def _open_checkpoint(path: Path, layout: ExpertLayout, layers: list[int]) -> Reader | None:
    """The checkpoint as a source for repair, if its experts can be had as they are in memory."""
    try:
        reader = CheckpointReader(path, layers=layers)
        stored = reader.layout(layout.slots)
        if [spec.dtype for spec in stored.tensors] == [spec.dtype for spec in layout.tensors]:
            return reader
        return ConvertedReader(reader, stored, layout)
    except (OSError, ValueError) as error:
        logger.warning("lost experts cannot be read from %s: %s", path, error)
        return None
