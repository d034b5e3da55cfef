"""This rank's part of the instance: one per scheduler process, made while SGLang builds the model.

SGLang builds its layers one by one; each MoE layer announces itself here. Once the weights are loaded, :meth:`Instance.start`
brings up the data plane with this rank alone in it. The rank joins at the first boundary of a step, when everything else
that SGLang prepares is done too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eep.control.launch.processes import INCARNATION
from eep.control.private_directory import CONTROL_DIRECTORY, member_rendezvous
from eep.data_plane.buffer import Buffer
from eep.experts.checkpoint.conversion import open_checkpoint
from eep.experts.coverage import Coverage, CoveragePolicy, LoadedExperts
from eep.experts.layout import checksum
from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair.executor import Reader, SourceLost, Want
from eep.experts.repair.repair_plan import Tier
from eep.experts.repair.repair_sources import RepairSources
from eep.observe.metrics import RankMetrics
from eep.recovery.session import Session
from eep.view import View
from sglang_patches import expert_backup, garbage_collector, options
from sglang_patches.rank import process_groups, step_sizes, token_forms
from sglang_patches.rank.expert_location import ExpertLocation, initial_placement
from sglang_patches.rank.expert_weights import ExpertWeights
from sglang_patches.rank.token_forms import MoeShape

logger = logging.getLogger(__name__)


ANY_STEP, DECODE_STEP = 0, 1
"""Numbers of buffers. Kernels of a graph have fixed shapes, so they go through a buffer that is no larger than they need."""


@dataclass
class Instance:
    rank: int
    max_tokens: tuple[int, ...]
    """The most tokens that a rank can have in a step, for each buffer: any step, and one in which all ranks decode."""
    device: str
    options: options.Options = field(default_factory=options.required)
    shape: MoeShape | None = None
    layer_ids: list[int] = field(default_factory=list)
    """SGLang's numbers of the MoE layers, in the order of the layers of the placement."""
    layers: list[Any] = field(default_factory=list)
    """The MoE layers themselves, once the model is loaded."""
    weights: ExpertWeights | None = None
    checkpoint: Reader | None = None
    """The checkpoint as a source for repair, if its experts can be had as they are in memory."""
    using: int = ANY_STEP
    """The buffer of the step under way. All ranks use the same."""
    _buffers: list[Buffer] = field(default_factory=list)
    _session: Session | None = None

    def add_layer(self, layer_id: int, shape: MoeShape) -> int:
        """The index of an MoE layer in the placement."""
        if self.shape is not None and shape != self.shape:
            raise SystemExit(f"--ep-backend eep needs MoE layers of one kind; this model has {self.shape} and {shape}")
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise SystemExit(
                f"--ep-backend eep: tokens cross ranks in float32 or bfloat16, and this model is in {shape.dtype}; "
                "use --dtype bfloat16"
            )
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
            len(self.layer_ids),
            self.shape.experts,
            self.shape.slots_per_rank,
            self.options.ranks,
            self.options.max_ranks,
        )

    @cached_property
    def location(self) -> ExpertLocation:
        return ExpertLocation(self.first_placement, self.rank, self.device)

    @property
    def buffer(self) -> Buffer:
        if not self._buffers:
            raise RuntimeError("the data plane is not up before the weights are loaded")
        return self._buffers[self.using]

    @property
    def has_joined(self) -> bool:
        """Whether this rank has asked to be let in."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """Asking for it the first time means: this rank is ready."""
        if self._session is None:
            # As soon as a view has this rank in it others look for what it holds, and look again only in the next view.
            self.coverage  # noqa: B018
            garbage_collector.leave_out_what_is_here(collect=True)
            self._session = Session(process_groups.world(), self._buffers, self._repair, self.run_empty)
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
        self.layers, self.weights = layers, weights
        self.checkpoint = _open_checkpoint(checkpoint, weights, self.layer_ids)
        if self.options.backup == "checkpoint":
            if self.checkpoint is None:
                raise SystemExit(
                    f"--eep-backup checkpoint: {checkpoint} does not have the experts as they are served (the log says "
                    "why); --eep-backup live has them as they are in memory"
                )
            expert_backup.describe_checkpoint(self.directory, checkpoint, self.layer_ids, weights.memory.layout)
        forms = token_forms.of_buffers(token_forms.Experts.of(layers[0], shape), len(self.max_tokens))
        logger.info("tokens cross ranks as %s", ", ".join(map(str, forms)))
        for number, (max_tokens, form) in enumerate(zip(self.max_tokens, forms, strict=True)):
            buffer = Buffer(
                self.rank,
                rendezvous=member_rendezvous() / f"tokens-{number}",
                max_ranks=self.options.max_ranks,
                max_tokens=max_tokens,
                hidden=shape.hidden,
                topk=shape.topk,
                local_experts=shape.slots_per_rank,
                layout=form.layout,
                wire=form.wire,
                device=self.device,
                incarnation=int(os.environ[INCARNATION]),
                timeout_ms=self.options.timeout_ms,
                shares_gpu=self.options.shares_gpu,
            )
            buffer.start_alone()
            self._buffers.append(buffer)

    def use_for(self, all_decode: bool) -> None:
        """The step that begins goes through the buffer for that kind of step."""
        self.using = DECODE_STEP if all_decode and len(self.max_tokens) > 1 else ANY_STEP

    @contextmanager
    def through(self, using: int) -> Iterator[None]:
        """What runs meanwhile goes through that buffer."""
        before, self.using = self.using, using
        try:
            yield
        finally:
            self.using = before

    def wait(self) -> None:
        """Until what this process has started on its device is done."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()

    def run_empty(self, using: int) -> None:
        """A step without tokens of this rank's own: its experts serve those of the others."""
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        shape = self.shape
        assert shape is not None
        with torch.no_grad(), self.through(using):
            x = torch.empty((0, shape.hidden), dtype=shape.dtype, device=self.device)
            ids = torch.empty((0, shape.topk), dtype=torch.int32, device=self.device)
            weights = torch.empty((0, shape.topk), dtype=torch.float32, device=self.device)
            for layer in self.layers:
                layer(x, StandardTopKOutput(weights, ids, x))
        self.wait()

    @property
    def directory(self) -> Path:
        """Private to this server."""
        return Path(os.environ[CONTROL_DIRECTORY])

    @cached_property
    def used(self) -> torch.Tensor | None:
        """``[layers, experts]``: how often this rank has asked for each, counted where experts may have to be masked."""
        if self.options.on_lost_coverage == "refuse":
            return None
        first = self.first_placement
        return torch.zeros((first.layers, first.experts), dtype=torch.int64, device=self.device)

    def _counted(self) -> FloatArray:
        assert self.used is not None
        return self.used.cpu().numpy().astype(np.float64)

    @cached_property
    def _metrics(self) -> RankMetrics:
        return RankMetrics(self.rank)

    @cached_property
    def coverage(self) -> Coverage:
        """What keeps every expert on an active rank."""
        weights = self.weights
        assert weights is not None
        kept = expert_backup.connect(
            self.directory,
            self.options.backup,
            self.rank,
            weights.memory,
            weights.shared,
            self.first_placement.experts,
        )
        return Coverage(
            LoadedExperts(
                self.rank,
                int(os.environ[INCARNATION]),
                self.first_placement,
                weights.memory,
                weights.shared,
                weights.checksums,
                self.device,
            ),
            member_rendezvous() / "experts",
            self.location.publish,
            CoveragePolicy(
                self.options.repair_timeout_s,
                self.options.on_lost_coverage,
                None if self.used is None else self._counted,
            ),
            RepairSources(self.checkpoint, kept.client),
            kept.offer,
        )


_current: Instance | None = None


def current() -> Instance:
    """The instance of this process; made at the first call, once SGLang has published its configuration."""
    global _current
    if _current is None:
        from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_server_args

        parallel = get_parallel()
        device = str(get_server_args().device or "cpu")
        largest = [step_sizes.largest_step(get_schedule())]
        if device != "cpu":
            running = -(-int(get_schedule().max_running_requests) // parallel.tp_size)
            largest.append(step_sizes.largest_decode(get_exec().graph.cuda_graph_config.decode, running))
        _current = Instance(
            rank=parallel.tp_rank,
            max_tokens=tuple(filter(None, largest)),
            device=device,
        )
    return _current


def _open_checkpoint(path: Path, weights: ExpertWeights, layers: list[int]) -> Reader | None:
    """The checkpoint as a source for repair, if it gives what was loaded from it: a model may have been quantised or
    reordered meanwhile."""
    layout = weights.memory.layout
    try:
        source = open_checkpoint(path, None, layers, [spec.dtype for spec in layout.tensors])
        if [spec.shape for spec in source.layout.tensors] != [spec.shape for spec in layout.tensors]:
            raise ValueError("its experts have other shapes than those that are served")
        layer, expert = (int(each) for each in np.argwhere(weights.checksums.known)[0])
        aside = [torch.empty_like(piece, device="cpu") for piece in weights.memory.pieces(layer, 0)]
        source.reader.read([Want(layer, expert, 0, aside)])
        if not weights.checksums.matches(layer, expert, checksum(aside)):
            raise ValueError("its experts are not those that are served: they were converted when they were loaded")
    except (OSError, ValueError, SourceLost) as error:
        logger.warning("lost experts cannot be read from %s: %s", path, error)
        return None
    return source.reader
