"""This rank's data plane: the buffers through which tokens cross ranks, and the tables that say where each token goes.

The plane is there as soon as the first MoE layer is built. :meth:`RankDataPlane.start` makes its buffers once the weights are
loaded, with this rank alone in them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from eep.control.launch.processes import INCARNATION
from eep.control.private_directory import member_rendezvous
from eep.data_plane.buffer import Buffer
from eep.data_plane.buffer_shape import BufferShape
from eep.data_plane.passage import Passage, count_portions
from eep.data_plane.region_size import choose_room, region_bytes
from eep.data_plane.token_buffer import TokenBuffer
from eep.experts.placement.packing import IntArray
from sglang_patches.rank import host_access, next_life, token_forms
from sglang_patches.rank.expert_location import ExpertLocation, find_turns
from sglang_patches.rank.model_facts import ModelFacts, get_facts
from sglang_patches.rank.patience import StepPatience
from sglang_patches.rank.token_forms import TokenForm

logger = logging.getLogger(__name__)

ANY_STEP, DECODE_STEP = 0, 1
"""Numbers of buffers. Kernels of a graph have fixed shapes, so they go through a buffer that is no larger than they need."""


_COUNTED_ON_CPU = 1 / 8
"""The share of the steps that are counted."""


class RankDataPlane:
    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.rank, self.device = facts.rank, facts.device
        self.buffers: list[Buffer] = []
        self._room = facts.max_tokens[ANY_STEP]
        """For how many tokens of a rank the buffer of any step has room."""
        self.passage = Passage(ANY_STEP)
        """That of the step under way. All ranks take the same."""
        self._layers: Sequence[Any] = ()
        self._turns = torch.empty(0)
        """Of the tokens of the step under way."""
        self._picked: list[torch.Tensor] = []
        """What the gates of the step under way have picked, layer by layer."""
        self._chance = random.Random(facts.rank)
        self._is_counted = False
        """Whether the step under way is."""
        self._counted_share = _COUNTED_ON_CPU if facts.device == "cpu" else 1.0
        asked = facts.options
        self.patience = StepPatience(asked.timeout_ms, asked.stall_timeout_s)
        """How long this rank waits for its peers, on a CPU. On a GPU no layer takes that long."""
        self.masks = asked.masks
        """Whether there may be experts that no slot holds."""
        self.advance: Callable[[], object] = _nothing
        """Says that this rank gets on with its step. To be called at every exchange of tokens."""
        self.run: Callable[[], object] = _nothing
        """Says the same, and that this rank waits for no peer until it says anything else."""
        self.may_take_long: Callable[[bool], object] = _nothing
        """Says whether what it runs from now on may compute for long."""

    @cached_property
    def location(self) -> ExpertLocation:
        """Where this rank sends the tokens of each expert."""
        return ExpertLocation(self._facts.first_placement, self.rank, self.device)

    @cached_property
    def used(self) -> torch.Tensor | None:
        """``[layers, 1 + experts]``: how often this rank has asked for each expert, on the device. The first column counts
        padding. None where nobody wants to know."""
        if not self.masks and self._facts.options.balance is None:
            return None
        first = self._facts.first_placement
        return torch.zeros((first.layers, 1 + first.experts), dtype=torch.int64, device=self.device)

    @cached_property
    def one(self) -> torch.Tensor:
        """The number 1, at an address that captured graphs may keep."""
        return torch.ones(1, dtype=torch.int64, device=self.device)

    def choose(self, layer: int, column: torch.Tensor) -> torch.Tensor:
        """In a step: the slots to which tokens go whose gate has picked these columns of ``choice``."""
        if layer == 0:
            self._turns = find_turns(column)
        return self.location.choice[layer][column, self._turns]

    def count(self, layer: int, column: torch.Tensor) -> None:
        """In a step: its gate has picked these columns of ``used``. They are added up in the last layer, for all layers at
        once. The host waits for nothing. On a CPU, which has no other to do it, only some steps are counted. Chance
        says which: were it each third, prompts that come every third step would be counted always or never."""
        if self.used is None:
            return
        if layer == 0:
            self._picked.clear()
            self._is_counted = self._chance.random() < self._counted_share
        if not self._is_counted:
            return
        self._picked.append(column)
        if layer == len(self.used) - 1:
            picked = (torch.stack(self._picked) + self._offsets).view(-1)
            self._picked.clear()
            self.used.view(-1).index_add_(0, picked, self.one.expand(len(picked)))

    @cached_property
    def _offsets(self) -> torch.Tensor:
        """``[layers, 1, 1]``: where each layer begins in ``used``."""
        assert self.used is not None
        layers, columns = self.used.shape
        return (torch.arange(layers, device=self.device) * columns).view(layers, 1, 1)

    def count_uses(self) -> IntArray:
        """``[layers, experts]``, as it is now. Any thread may ask; the step under way does not wait."""
        assert self.used is not None
        counted: IntArray = self.used.cpu().numpy()[:, 1:]
        return counted

    @property
    def buffer(self) -> TokenBuffer:
        """The buffer of the step under way."""
        if not self.buffers:
            raise RuntimeError(f"rank {self.rank} has no buffers yet: they are made when its weights are loaded")
        return self.buffers[self.passage.buffer]

    def start(self, layers: Sequence[Any]) -> None:
        """Make the buffers, with this rank alone in them. ``layers``: the loaded MoE layers of the model."""
        facts, shape, awaited = self._facts, self._facts.moe_shape, next_life.is_awaited()
        self._layers = layers
        # These tensors are to be there before SGLang measures the memory that is left, and before it captures graphs.
        self.location, self.one  # noqa: B018
        if self.used is not None:
            self._offsets  # noqa: B018
        kernels = token_forms.ExpertKernels.of(layers[0], shape)
        kernels.check(shape)
        forms = token_forms.choose_forms(kernels, len(facts.max_tokens))
        logger.info("tokens cross ranks as %s", ", ".join(map(str, forms)))
        self._choose_room(forms[ANY_STEP])
        for number, (tokens, form) in enumerate(zip((self._room, *facts.max_tokens[1:]), forms, strict=True)):
            buffer = Buffer(
                self.rank,
                **dataclasses.asdict(self._shape(form, tokens)),
                rendezvous=member_rendezvous() / f"tokens-{number}",
                device=self.device,
                incarnation=None if awaited else int(os.environ[INCARNATION]),
                timeout_ms=self.patience.within_step_ms if self.device == "cpu" else facts.options.timeout_ms,
                shares_gpu=facts.options.shares_gpu,
                claims=not awaited,
                hosts=host_access.remote_hosts(facts.options, f"tokens-{number}"),
            )
            if awaited:
                next_life.when_begun(buffer.claim)
            buffer.start_alone()
            self.buffers.append(buffer)

    def _choose_room(self, form: TokenForm) -> None:
        most = self._facts.max_tokens[ANY_STEP]
        self._room = choose_room(
            most, self._facts.options.portion_tokens, lambda tokens: region_bytes(self._shape(form, tokens))
        )
        if self._room < most:
            logger.info("a step of more than %d tokens crosses ranks in portions; it may have %d", self._room, most)
        # A rank that is alone has nobody to agree with, and may have a step of any size.
        self.passage = Passage(ANY_STEP, count_portions([most], self._room))

    def _shape(self, form: TokenForm, tokens: int) -> BufferShape:
        shape = self._facts.moe_shape
        return BufferShape(
            max_ranks=self._facts.options.max_ranks,
            max_tokens=tokens,
            hidden=shape.hidden,
            topk=shape.topk,
            local_experts=shape.slots_per_rank,
            layout=form.layout,
            wire=form.wire,
        )

    def use_for(self, all_decode: bool, sizes: Iterable[int]) -> None:
        """Choose the passage of the step that begins. ``all_decode``: every rank decodes in it; ``sizes``: how many tokens
        each has. All ranks choose alike, since they have heard the same."""
        if all_decode and len(self._facts.max_tokens) > 1:
            self.passage = self.decode_passage
        else:
            self.passage = Passage(ANY_STEP, count_portions(sizes, self._room))

    @property
    def decode_passage(self) -> Passage:
        """That of steps which are captured. A graph has no portions: their buffer has room for every request that a rank may
        run at once. SystemExit if there is no such buffer."""
        if len(self._facts.max_tokens) == 1:
            raise SystemExit(
                "--ep-backend eep: SGLang captures decode steps, but says that it captures none, and there is no buffer for "
                "them; add --disable-cuda-graph"
            )
        return Passage(DECODE_STEP)

    def allow_for(self, prefills: bool, sizes: Iterable[int]) -> None:
        """Wait for peers for as long as the step that begins may take. ``prefills``: at least one rank does so in it;
        ``sizes``: how many tokens each rank has."""
        self.patience.begin(prefills, max(sizes))
        self.may_take_long(self.patience.for_long_work)
        if self.device == "cpu":
            for buffer in self.buffers:
                if buffer.timeout_ms != self.patience.within_step_ms:
                    buffer.timeout_ms = self.patience.within_step_ms

    @contextmanager
    def through(self, passage: Passage) -> Iterator[None]:
        """What runs in this context takes that passage."""
        before, self.passage = self.passage, passage
        try:
            yield
        finally:
            self.passage = before

    def wait(self) -> None:
        """Until what this process has started on its device is done."""
        if self.device != "cpu":
            self.wait_for(torch.cuda.current_stream())

    def wait_for(self, work: Any) -> None:
        """Until ``work`` on the device is done: a stream, or an event. The rank says that it waits, and then that it runs."""
        self.advance()
        work.synchronize()
        self.run()

    def run_empty(self, passage: Passage) -> None:
        """Run a step without tokens of this rank's own: its experts serve the tokens of the others."""
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        shape = self._facts.moe_shape
        with torch.no_grad(), self.through(passage):
            x = torch.empty((0, shape.hidden), dtype=shape.dtype, device=self.device)
            ids = torch.empty((0, shape.topk), dtype=torch.int32, device=self.device)
            weights = torch.empty((0, shape.topk), dtype=torch.float32, device=self.device)
            for layer in self._layers:
                layer(x, StandardTopKOutput(weights, ids, x))
        self.wait()


def _nothing(*_: object) -> None:
    pass


_plane: RankDataPlane | None = None


def get_plane() -> RankDataPlane:
    """The data plane of this process."""
    global _plane
    if _plane is None:
        _plane = RankDataPlane(get_facts())
    return _plane
