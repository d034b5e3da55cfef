"""DeepEP's second interface, ``ElasticBuffer``, for its dispatch and combine within one host.

It is normal mode with another face: the counts, the order of rows and the faults are those of
:mod:`eep.compat.normal_mode`. So every dispatch is deterministic and waits for the counts on the host; ``do_cpu_sync=False``
changes nothing, and tensors are never larger than what came. In the expanding layout the padding is always zero. There the
outputs of a token's experts on one rank are added up on it, in fp32, before they travel as bf16; without
``allow_multiple_reduction`` each travels by itself. Engram, pipelines and all-gather sessions are not there.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from eep.compat.checks import check_destroy, check_tensor, device_of, local_experts_of
from eep.compat.elastic_handle import EPHandle, check_is_handle
from eep.compat.elastic_layout import Slots, add_in_order, choices_of_rows, column_major, last_choices, rows_by_choice
from eep.compat.normal_layout import Routes, Tokens, parts_of, sum_by_token
from eep.compat.normal_mode import NormalMode
from eep.compat.stream_events import EventHandle, EventOverlap, after, current_stream, wait_for
from eep.errors import EepError


class ElasticBuffer:
    """The dispatch and combine of one rank. Sizes in bytes, queue pairs and modes are accepted and not needed."""

    _MISSING: ClassVar[tuple[str, ...]] = ("engram_", "pp_", "agrs_", "create_agrs", "destroy_agrs", "all_gather")

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """A rank that does not answer within ``num_gpu_timeout_secs`` ends a call with :class:`eep.StepFailed`."""
        self.group, self.num_bytes = group, num_bytes or 0
        self.num_max_tokens_per_rank, self.deterministic = num_max_tokens_per_rank, deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps, self.explicitly_destroy = num_allocated_qps or 17, explicitly_destroy
        self.runtime: NormalMode | None = NormalMode(
            group, explicitly_destroy=True, timeout_ms=num_gpu_timeout_secs * 1e3
        )
        self.rank_idx, self.num_ranks = self.runtime.rank, self.runtime.group_size
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(self._MISSING):
            raise EepError(
                f"{name} is not there: eep.compat.elastic has the dispatch and combine of ElasticBuffer only"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def destroy(self) -> None:
        check_destroy(self.explicitly_destroy)
        if self.runtime is not None:
            self.runtime.destroy()
            self.runtime = None

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup, num_max_tokens_per_rank: int, hidden: int, *_: Any, **__: Any
    ) -> int:
        """The caller need not provide any bytes."""
        return 0

    def get_physical_domain_size(self) -> tuple[int, int]:
        """One host."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """Has no effect."""
        return NormalMode.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Has no effect."""
        return min(num_sms, self.num_allocated_qps)

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        return current_stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits for every rank. Raises :class:`eep.StepFailed` if one does not come."""
        self._rank().meet_in_normal_mode()

    # ---- the step ----

    def dispatch(
        self,
        x: Tokens,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Returns ``(recv_x, recv_topk_idx, recv_topk_weights, handle, event)``. Expanding, rows lie by local expert, one for
        each choice, there is no ``recv_topk_idx``, and ``recv_topk_weights`` has one value for each row."""
        rank, values = self._rank(), parts_of(x)[0]
        device, alignment = values.device, 1 if expert_alignment is None else expert_alignment
        stats, name = cumulative_local_expert_recv_stats, "cumulative_local_expert_recv_stats"
        wait_for(previous_event)
        if handle is None:
            if topk_idx is None or num_experts is None:
                raise ValueError("a dispatch without a handle needs topk_idx and num_experts")
            check_tensor(device, "topk_idx", topk_idx, torch.int64, len(values), None)
            local_experts = local_experts_of(num_experts, self.num_ranks)
            if stats is not None:
                check_tensor(device, name, stats, torch.int32, local_experts)
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank or len(topk_idx)
            if len(topk_idx) > most:
                raise ValueError(f"x has {len(topk_idx)} tokens; num_max_tokens_per_rank allows {most}")
            weights = topk_weights
            if weights is None:
                weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=device)
            per_rank, _, per_expert, in_rank, _ = rank.get_dispatch_layout(topk_idx, num_experts)
            got, idx, got_weights, counts, normal, _ = rank.dispatch(
                x, None, per_rank, None, in_rank, per_expert, topk_idx, weights, alignment
            )
            assert idx is not None
            assert counts is not None
            assert normal is not None
            slots = Slots.of(idx, local_experts, alignment)
            routes = topk_idx.clone() if do_handle_copy else topk_idx
            handle = EPHandle.of(
                self.rank_idx, do_expand, num_experts, alignment, most, routes, idx, counts, normal, slots
            )
        else:
            if topk_idx is not None:
                raise ValueError("a dispatch with a handle sends no topk_idx: it goes where the first one went")
            check_is_handle(handle)
            if stats is not None:
                check_tensor(device, name, stats, torch.int32, *handle.slots.counts.shape)
            got, *_ = rank.dispatch(x, handle.normal)
            got_weights = None
            if topk_weights is not None:
                check_tensor(device, "topk_weights", topk_weights, torch.float32, *handle.topk_idx.shape)
                is_here = handle.recv_topk_idx >= 0
                got_weights = torch.where(is_here, rank.send_again(topk_weights, handle.normal), 0.0)
        slots, expands = handle.slots, handle.do_expand
        if stats is not None:
            stats.add_(slots.counts)
        data, scales = got if isinstance(got, tuple) else (got, None)
        if expands:
            data = slots.spread(data.view(torch.uint8)).view(data.dtype)
            scales = None if scales is None else slots.spread(scales)
        if scales is not None and use_tma_aligned_col_major_sf:
            scales = column_major(scales)
        if topk_weights is None or got_weights is None:
            got_weights = None
        elif expands:
            got_weights = slots.spread_choices(got_weights)
        recv_x: Tokens = data if scales is None else (data, scales)
        return recv_x, None if expands else handle.recv_topk_idx, got_weights, handle, after(device)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Returns ``(combined_x, combined_topk_weights, event)``: sums without weights. Each begins with the bias. What the
        ranks give for a token is added in the order of the token's last choices on them."""
        check_is_handle(handle)
        wait_for(previous_event)
        rank, slots, device = self._rank(), handle.slots, device_of("x", x)
        rows, routes = (
            slots.rows if handle.do_expand else handle.num_recv_tokens,
            Routes.of_handle(handle.normal, self.rank_idx),
        )
        check_tensor(device, "x", x, torch.bfloat16, rows, None)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        for each in biases:
            check_tensor(device, "bias", each, torch.bfloat16, len(handle.topk_idx), x.shape[1])
        if topk_weights is not None:
            of_rows = (rows,) if handle.do_expand else tuple(handle.recv_topk_idx.shape)
            check_tensor(device, "topk_weights", topk_weights, torch.float32, *of_rows)

        owned = choices_of_rows(handle.topk_idx, routes, handle.num_experts // self.num_ranks)
        if handle.do_expand and not self.allow_multiple_reduction:
            chosen = slots.of_choice >= 0
            back = rank.send_back(x[slots.of_choice[chosen].long()], routes, chosen.sum(1), owned.sum(1))
        else:
            if handle.do_expand:
                nothing = torch.zeros(len(slots.of_choice), x.shape[1], dtype=torch.float32, device=device)
                x = add_in_order(nothing, x, slots.of_choice).to(torch.bfloat16)
            owned = last_choices(owned)
            back = rank.send_back(x, routes)
        start = torch.zeros(len(handle.topk_idx), x.shape[1], dtype=torch.float32, device=device)
        for each in biases:
            start += each.float()
        combined = add_in_order(start, back, rows_by_choice(owned, routes, len(handle.topk_idx))).to(torch.bfloat16)
        combined_weights = None
        if topk_weights is not None:
            if handle.do_expand:
                topk_weights = slots.gather_choices(topk_weights)
            # A rank knows the weights of its own experts.
            topk_weights = torch.where(handle.recv_topk_idx >= 0, topk_weights, 0.0)
            nothing = torch.zeros(handle.topk_idx.shape, dtype=torch.float32, device=device)
            combined_weights = sum_by_token(rank.send_back(topk_weights, routes), routes, nothing)
        return combined, combined_weights, after(device, x, topk_weights)

    # ---- inside ----

    def _rank(self) -> NormalMode:
        if self.runtime is None:
            raise EepError("this buffer was destroyed; make a new one")
        return self.runtime
