"""The exchange of tokens between ranks: SGLang's dispatcher interface over :class:`eep.Buffer`.

SGLang's models branch on the name of an all-to-all backend. ``server/flags.py`` names ``mooncake``, whose branches are right
for any backend that exchanges tokens inside the MoE layer. Here the class behind that name becomes ours, and the layer stays
the plain ``FusedMoE``. It takes tokens in SGLang's STANDARD format (rows, the local slots that each row is for, -1 for "not
here", and their weights) or in that of DeepEP's low latency. :mod:`.token_forms` decides which.

Where a step has portions (:mod:`eep.data_plane.passage`), a layer runs once for each: dispatch, experts, combine. The gate
has picked by then, for all tokens, and the portions of the output lie in one tensor.

With ``--eep-on-lost-coverage mask`` there may be experts that no slot holds. :mod:`.masked_gate` keeps gates from them. Where
too few others are left for a token, a pick of such an expert goes nowhere and weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eep.data_plane.tokens import ExpertTokens, RankTokens
from sglang_patches import cpu, hooks, options
from sglang_patches.rank import masked_gate, model_facts, rank_data_plane
from sglang_patches.rank.rank_data_plane import RankDataPlane
from sglang_patches.rank.token_forms import MoeShape


def register() -> None:
    hooks.hook("layers.moe.fused_moe_triton.layer.create_moe_dispatcher", _create, "replace")
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl", _forward)
    hooks.hook("layers.moe.ep_moe.layer.get_moe_impl_class", _impl_class, "replace")
    hooks.hook("layers.moe.utils.MoeA2ABackend.is_deepep", _is_deepep)
    if not cpu.is_asked_for():
        hooks.hook("layers.moe.moe_runner.base.FusedOpPool.get_fused_func", _kernels_in_one)
    if options.required().masks:
        masked_gate.register()


def _create(moe_runner_config: Any, *_: Any, **__: Any) -> Any:
    asked, slots = options.required(), moe_runner_config.num_local_experts
    shape = MoeShape(
        experts=moe_runner_config.num_experts - asked.redundant_experts,
        slots_per_rank=max(slots, asked.most_slots),
        hidden=moe_runner_config.hidden_size,
        topk=moe_runner_config.top_k,
        dtype=moe_runner_config.params_dtype,
        open_slots=slots if asked.most_slots > slots else 0,
    )
    # Models scale what a backend that exchanges tokens returns. The kernels are those for no exchange, and would scale it
    # a second time.
    moe_runner_config.routed_scaling_factor = None
    layer = model_facts.get_facts().add_layer(moe_runner_config.layer_id, shape)
    return make_dispatcher(rank_data_plane.get_plane(), layer)


def _impl_class(*_: Any, **__: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return FusedMoE


def _is_deepep(original: Callable[[Any], bool], backend: Any) -> bool:
    # In version 0.5.17, Qwen3-MoE asks for this one backend by name.
    return original(backend) or backend.is_mooncake()


def _kernels_in_one(original: Callable[..., Any], pool: Any, dispatch_name: str, runner_name: str) -> Any:
    """By the name of the backend SGLang would choose a path of its own, which cannot use tokens that are quantised already.
    To its Triton kernels, the tokens that our ranks exchange look as if nothing were exchanged."""
    return original(pool, "none" if runner_name == "triton" else dispatch_name, runner_name)


def _forward(
    original: Callable[..., torch.Tensor], moe_layer: Any, hidden_states: torch.Tensor, topk_output: Any, **named: Any
) -> torch.Tensor:
    passage = rank_data_plane.get_plane().passage
    if passage.portions == 1:
        return original(moe_layer, hidden_states, topk_output, **named)
    routed = moe_layer.dispatcher.route(topk_output)
    output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    for rows in passage.cut(len(hidden_states)):
        # Rows that the caller has quantised itself (``named``) are those of this rank, and experts get rows of all ranks.
        original(moe_layer, hidden_states[rows], routed.portion(rows, output))
    return output


@dataclass(frozen=True)
class RoutedTokens:
    """Where tokens go. The layer hands it to the dispatcher in place of what the gate has picked."""

    slots: torch.Tensor
    """int64 ``[tokens, k]``, -1 for none."""
    weights: torch.Tensor
    router_logits: torch.Tensor
    """Of all tokens of the layer. Kernels want it to be there, and do not read it."""
    output: torch.Tensor | None = None
    """Where the sums go that come back; None for a tensor of their own."""

    def portion(self, rows: slice, output: torch.Tensor) -> RoutedTokens:
        return RoutedTokens(self.slots[rows], self.weights[rows], self.router_logits, output[rows])


def make_dispatcher(plane: RankDataPlane, layer: int) -> Any:
    """A dispatcher for one MoE layer. The class is made in the function because its base is SGLang's."""
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher

    class EepDispatcher(BaseDispatcher):  # type: ignore[misc]
        def route(self, topk_output: Any) -> RoutedTokens:
            return route_tokens(plane, layer, topk_output)

        def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
            routed = topk_output if isinstance(topk_output, RoutedTokens) else self.route(topk_output)
            self._exchange = TokenExchange(plane, hidden_states, routed)
            return self._exchange.received(routed.router_logits)

        def combine(self, combine_input: Any) -> torch.Tensor:
            return self._exchange.combine(combine_input.hidden_states)

    return EepDispatcher()


def route_tokens(plane: RankDataPlane, layer: int, topk_output: Any) -> RoutedTokens:
    """The slots of the experts that the gate of a layer has picked, and their weights."""
    # As few kernels as possible, since prefill is eager. Rows that are only padding ask for expert -1: column 0.
    column = topk_output.topk_ids + plane.one  # of the type of plane.one, in one kernel
    slots = plane.choose(layer, column)
    weights = topk_output.topk_weights.float()
    plane.count(layer, column)
    if plane.masks:
        weights = torch.where(slots >= 0, weights, 0.0)
    return RoutedTokens(slots.contiguous(), weights.contiguous(), topk_output.router_logits)


class TokenExchange:
    """One dispatch and its combine. SGLang gets aliases of our memory, which it may dispose of."""

    def __init__(self, plane: RankDataPlane, x: torch.Tensor, routed: RoutedTokens) -> None:
        plane.advance()
        self._buffer = plane.buffer
        self._dtype, self._output = x.dtype, routed.output
        self._tokens = self._buffer.dispatch(x.contiguous(), routed.slots, routed.weights)
        plane.run()
        self._plane = plane
        self._rows: torch.Tensor | None = None

    def received(self, router_logits: torch.Tensor) -> Any:
        """The tokens for the experts of this rank, in the form that their kernels take."""
        if isinstance(self._tokens, ExpertTokens):
            return self._by_expert(self._tokens)
        return self._by_rank(self._tokens, router_logits)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """For each token that this rank sent, the sum of what all ranks made of it."""
        if self._rows is not None:
            outbox = self._buffer.combine_input()
            outbox[self._rows] = y.to(outbox.dtype)
            y = outbox
        self._plane.advance()
        combined = self._buffer.combine(y.to(self._buffer.combine_dtype), self._tokens, out=self._output).to(
            self._dtype
        )
        self._plane.run()
        return combined

    def _by_rank(self, tokens: RankTokens, router_logits: torch.Tensor) -> Any:
        """Rows, the local slots that each is for, and their weights."""
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        ids, weights = tokens.topk_idx, tokens.topk_weights
        if tokens.scales is not None:
            # The kernel takes the quantised rows, and leaves its results where combine expects them.
            return StandardDispatchOutput(
                _alias(self._buffer.combine_input()),
                None,
                StandardTopKOutput(weights, ids, router_logits),
                hidden_states_pre_quant=(tokens.x, tokens.scales),
            )
        x = _alias(tokens.x)
        if x.device.type == "cpu":
            # On a GPU the shape may not depend on the data, and kernels skip rows that are for no expert of this rank.
            self._rows = tokens.rows()
            x, ids, weights = x[self._rows], ids[self._rows], weights[self._rows]
        return StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, router_logits))

    def _by_expert(self, tokens: ExpertTokens) -> Any:
        """The rows of each local slot, and how many of them count. Combine applies the weights."""
        from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput

        sent, slots = tokens.sent, tokens.x.shape[0]
        # A hint for the choice of a kernel: the rows of a slot if every rank sends as many as this one.
        usual = -(-sent.topk_idx.numel() // slots)
        return DeepEPLLDispatchOutput(
            _alias(tokens.x),
            None if tokens.scales is None else _alias(tokens.scales),
            sent.topk_idx,
            sent.topk_weights,
            tokens.expert_counts,
            max(1, usual),
        )


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()
