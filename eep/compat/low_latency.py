"""DeepEP's low-latency calls: tokens by expert, in memory of a size that is known before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from eep.compat import sizes
from eep.compat.checks import (
    check_choices,
    check_handle,
    check_scaled,
    check_tensor,
    device_of,
    local_experts_of,
    refuse,
)
from eep.compat.deep_ep_rank import default_device
from eep.compat.flights import Flight
from eep.compat.normal_mode import NormalMode
from eep.compat.sizes import WIRE, Sizes
from eep.compat.stream_events import EventHandle, EventOverlap, after, current_stream
from eep.data_plane.token_buffer import SplitTokenBuffer
from eep.data_plane.tokens import ExpertTokens
from eep.errors import StepFailed

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
Hook = Callable[[], None]


class DeepEpBuffer(NormalMode):
    """The low-latency calls of one rank, beside those of normal mode. Programs know this class by DeepEP's name for it,
    ``Buffer``."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes of address space that a rank of ``num_ranks`` shares, for any K; memory follows use. A constructor that
        is given this number of bytes makes its memory for these sizes."""
        return sizes.hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether fp8 and the low-latency calls are there: they are in every build."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """The event after what the current stream was given so far."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """The current stream, on which all calls run."""
        return current_stream()

    # ---- the step ----

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Returns ``(recv_x, packed_recv_count, handle, event, hook)``. Where there is a hook, calling it fills them.

        With L local experts, R ranks of capacity, T tokens at most and H hidden, ``recv_x`` is bf16
        ``[L, R*T, H]``, or a pair of fp8 and its scales, column-major: fp32 ``[L, R*T, H/128]`` or, with
        ``use_ue8m0``, four exponents to an int32 ``[L, R*T, H/512]``.
        """
        refuse(dispatch_wait_recv_cost_stats is not None, "dispatch_wait_recv_cost_stats", "pass None")
        refuse(async_finish and return_recv_hook, "async_finish with return_recv_hook", "choose one")
        if use_fp8 and use_ue8m0 and not round_scale:
            raise ValueError("use_ue8m0 sends powers of two; pass round_scale=True as well")
        wire = WIRE if not use_fp8 else "fp8_ue8m0" if use_ue8m0 else "fp8_pow2" if round_scale else "fp8"
        device = device_of("x", x)
        check_tensor(device, "x", x, torch.bfloat16, None, None)
        check_tensor(device, "topk_idx", topk_idx, torch.int64, len(x), None)
        if len(x) > (limit := num_max_dispatch_tokens_per_rank):
            raise ValueError(f"x has {len(x)} tokens; num_max_dispatch_tokens_per_rank allows {limit}")
        # Before memory is made for these sizes: other sizes end what is in flight.
        check_choices(topk_idx.shape[1])
        if use_fp8:
            check_scaled(x.shape[1])
        sized = self._sizes(limit, x.shape[1], num_experts)
        if (stats := cumulative_local_expert_recv_stats) is not None:
            check_tensor(device, "cumulative_local_expert_recv_stats", stats, torch.int32, sized.local_experts)
        inner: SplitTokenBuffer = self._sized(sized, device)
        routes = topk_idx.clone() if self._masked_routes is None else self._masked_routes.of(topk_idx)
        sent = inner.dispatch_send(x, routes, channel=self._flights.free_channel(), wire=wire)
        tokens = inner.tokens_of(sent)
        assert isinstance(tokens, ExpertTokens)
        flight = self._flights.add(inner, tokens)
        tokens = flight.tokens

        def receive() -> None:
            self._check_flight(flight)
            flight.receive()
            if stats is not None:
                stats.add_(tokens.expert_counts)

        if not return_recv_hook:
            receive()
        recv_x = tokens.x if tokens.scales is None else (tokens.x, tokens.scales)
        handle = (tokens.src_info, tokens.layout_range, limit, inner.hidden, num_experts)
        return recv_x, tokens.expert_counts, handle, after(device), receive if return_recv_hook else None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Returns ``(combined_x, event, hook)``: for each token the weighted sum over its experts, bf16.

        With ``zero_copy`` combine takes the outputs from :meth:`get_next_low_latency_combine_buffer`, and of ``x``
        only the shape counts. ``use_logfmt`` allows outputs to be rounded on their way; they travel as bf16, unrounded,
        all the same. ``topk_idx`` is that of the dispatch; an entry set to -1 is left out of the sum.
        """
        refuse(combine_wait_recv_cost_stats is not None, "combine_wait_recv_cost_stats", "pass None")
        refuse(async_finish and return_recv_hook, "async_finish with return_recv_hook", "choose one")
        # Check everything before sending anything: half a combine cannot be taken back.
        self._connected()
        check_handle(handle, 5)
        flight = self._flights.find(handle[0])
        inner, tokens = flight.inner, flight.tokens
        dispatched, device = tokens.sent.topk_idx, inner.device
        check_tensor(device, "x", x, torch.bfloat16, *tokens.x.shape)
        check_tensor(device, "topk_idx", topk_idx, torch.int64, *dispatched.shape)
        check_tensor(device, "topk_weights", topk_weights, torch.float32, *dispatched.shape)
        if self._masked_routes is not None:
            topk_idx = torch.where(dispatched >= 0, topk_idx, -1)
        # Reading values from a GPU would wait for it.
        if device.type == "cpu" and not ((topk_idx == dispatched) | (topk_idx == -1)).all():
            raise ValueError("topk_idx names experts to which the dispatch of this handle did not send the token")
        if out is None:
            out = torch.empty(len(dispatched), inner.hidden, dtype=torch.bfloat16, device=device)
        check_tensor(device, "out", out, torch.bfloat16, len(dispatched), inner.hidden)
        flight.send_back(inner.combine_input(tokens.sent.channel) if zero_copy else x)

        def receive() -> None:
            self._check_flight(flight)
            flight.add_up(topk_idx, topk_weights, out)

        if not return_recv_hook:
            receive()
        return out, after(device), receive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Where experts may write their outputs, bf16 ``[L, R*T, H]``, for a combine with ``zero_copy``."""
        self._connected()
        check_handle(handle, 5)
        flight = self._flights.find(handle[0])
        return flight.inner.combine_input(flight.tokens.sent.channel)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Makes the memory for these sizes if it is not there, and meets the other ranks; one that does not come within
        ``timeout_ms`` is masked. All ranks call this together. The memory is on the GPU if there is one, unless an earlier
        dispatch was on the CPU. Flags need no cleaning."""
        device = default_device() if self._inner is None else self._inner.device
        inner = self._sized(self._sizes(num_max_dispatch_tokens_per_rank, hidden, num_experts), device)
        with contextlib.suppress(StepFailed):  # the mask says who did not come
            inner.barrier(inner.timeout_ms / 1e3)

    def _check_flight(self, flight: Flight) -> None:
        self._connected()
        self._flights.check(flight)

    def _sizes(self, max_tokens: int, hidden: int, num_experts: int) -> Sizes:
        return Sizes(max_tokens, hidden, local_experts_of(num_experts, self.group_size))
