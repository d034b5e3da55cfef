"""NIXL's interface for elastic expert parallelism, for its low-latency calls; they have DeepEP's shapes and types.

``import eep.compat.nixl_ep as nixl_ep`` takes the place of ``import nixl_ep``. These things are different:

* ``update_memory_buffers`` makes the memory for ``num_ranks`` ranks. The number of bytes says for which tokens: it must be
  what ``get_rdma_size_hint`` returned in this process.
* ``connect_ranks`` is called by ranks that start together, naming each other; by members, naming new ranks; and by those new
  ranks, naming the members. It changes the members between two steps, on all of them the same. Ranks that start
  together meet in it, others in the next dispatch; one that does not come is masked.
* A rank that does not answer within ``timeout_ms`` is masked. ``disconnect_ranks`` ends that: the rank may then come back, as
  a new process, or after it has disconnected all others itself. It begins another life then, and makes its memory anew. A
  token may name experts of ranks that are not connected; they add nothing.
* The calls of high throughput (``ht_*``) and of checkpoints are not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from eep.compat import sizes
from eep.compat.checks import check_destroy, refuse
from eep.compat.config import Config
from eep.compat.deep_ep import topk_idx_t
from eep.compat.low_latency import DeepEpBuffer, Handle, Hook
from eep.compat.nixl_rank import KeyStore, NixlRank, place_of
from eep.compat.stream_events import EventHandle, EventOverlap, current_stream
from eep.errors import EepError

__all__ = ["DEFAULT_TIMEOUT_MS", "Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]

DEFAULT_TIMEOUT_MS = 10_000


class NixlEpBuffer:
    """The calls of one rank. Programs know this class by NIXL's name for it, ``Buffer``."""

    num_sms = DeepEpBuffer.num_sms

    def __init__(
        self,
        nvlink_backend: str = "nixl",
        explicitly_destroy: bool = False,
        rank: int = 0,
        enable_shrink: bool = False,
        group: dist.ProcessGroup | None = None,
        comm: Any = None,
        tcp_store_group: KeyStore | None = None,
        *,
        disable_ll_nvlink: bool = False,
        timeout_ms: float = DEFAULT_TIMEOUT_MS,
    ) -> None:
        """NVLink options are accepted and not needed."""
        refuse(comm is not None, "comm", "give a process group or a TCPStore")
        self.rank, self.group, self.comm, self.tcp_store_group = rank, group, None, tcp_store_group
        self.explicitly_destroy, self._timeout_ms = explicitly_destroy, timeout_ms
        self.group_size = 0
        self.runtime: NixlRank | None = None

    # ---- life ----

    @staticmethod
    def get_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """The bytes of address space that a rank shares; memory follows use."""
        return sizes.hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def set_tcp_store_group(self, tcp_store_group: KeyStore | None) -> None:
        self.tcp_store_group = tcp_store_group

    def update_memory_buffers(self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int) -> None:
        """Makes the memory. Once only: the others map it."""
        if self.runtime is not None:
            raise EepError("the memory of this buffer is there already; make a new buffer for other sizes")
        asked = sizes.hinted(num_rdma_bytes)
        if asked is None:
            raise ValueError(
                f"num_rdma_bytes is {num_rdma_bytes}; pass what get_rdma_size_hint returned in this process"
            )
        made = sizes.Sizes(asked.max_tokens, asked.hidden, num_experts_per_rank)
        place = place_of(self.tcp_store_group, self.group)
        self.runtime = NixlRank(self.rank, num_ranks, made, place, self.explicitly_destroy, self._timeout_ms)
        self.group_size = num_ranks

    def destroy(self) -> None:
        """Gives up the rank and its memory."""
        check_destroy(self.explicitly_destroy)
        if self.runtime is not None:
            self.runtime.destroy()
            self.runtime = None

    # ---- who is in ----

    def connect_ranks(self, remote_ranks: Iterable[int], activate: bool = True) -> None:
        """``activate=False`` leaves them masked until ``update_mask_buffer(rank, False)``: there is nothing to prepare."""
        if activate:
            self._rank().connect(remote_ranks)

    def disconnect_ranks(self, remote_ranks: Iterable[int]) -> None:
        self._rank().disconnect_ranks(remote_ranks)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank (:meth:`disconnect_ranks`) or unmasks it (:meth:`connect_ranks`)."""
        (self.disconnect_ranks if mask else self.connect_ranks)([rank_to_mask])

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills int32 ``[num_ranks]``: 1 for a rank that is not connected or did not answer."""
        self._rank().low_latency_query_mask_buffer(mask_status)

    def clean_mask_buffer(self) -> None:
        """Forgets who did not answer, in a new epoch of the same members."""
        self._rank().low_latency_clean_mask_buffer()

    def barrier(self) -> None:
        """Waits for all that are connected. Raises :class:`eep.StepFailed` if one does not come."""
        self._rank().barrier()

    # ---- the step ----

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        **options: Any,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """As DeepEP's ``low_latency_dispatch``, with the same options."""
        return self._rank().low_latency_dispatch(x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, **options)

    def combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Handle, **options: Any
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """As DeepEP's ``low_latency_combine``, with the same options."""
        return self._rank().low_latency_combine(x, topk_idx, topk_weights, handle, **options)

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        return self._rank().get_next_low_latency_combine_buffer(handle)

    def clean_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Meets the other ranks. Flags need no cleaning."""
        self._rank().clean_low_latency_buffer(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    # ---- small things ----

    @staticmethod
    def is_sm90_compiled() -> bool:
        return DeepEpBuffer.is_sm90_compiled()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        DeepEpBuffer.set_num_sms(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        return current_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0
    ) -> torch.Tensor:
        return self._rank().get_local_buffer_tensor(dtype, size, offset)

    def _rank(self) -> NixlRank:
        if self.runtime is None:
            raise EepError("this buffer has no memory; call update_memory_buffers first")
        return self.runtime


Buffer = NixlEpBuffer
"""The name that programs written for NIXL import."""
