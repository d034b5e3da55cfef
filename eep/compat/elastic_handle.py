"""``EPHandle``: what a dispatch of DeepEP's second interface leaves behind."""

from __future__ import annotations

import dataclasses

import torch

from eep.compat.elastic_layout import Slots
from eep.compat.normal_layout import NormalHandle
from eep.compat.normal_mode import NormalMode


@dataclasses.dataclass(slots=True, eq=False)
class EPHandle:
    """What a dispatch leaves for its combine, and for dispatches along the same routes. The names are DeepEP's."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    """int32 ``[received, 2 + topk]``: the token's number among those of all ranks, its row, and the rows of its choices."""
    dst_buffer_slot_idx: torch.Tensor
    token_metadata_at_forward: None
    channel_linked_list: None
    """These two belong to ranks on several hosts."""
    normal: NormalHandle
    recv_topk_idx: torch.Tensor
    slots: Slots

    @classmethod
    def of(
        cls,
        rank: int,
        do_expand: bool,
        num_experts: int,
        alignment: int,
        most: int,
        topk_idx: torch.Tensor,
        recv_topk_idx: torch.Tensor,
        counts: list[int],
        normal: NormalHandle,
        slots: Slots,
    ) -> EPHandle:
        """For the dispatch that left ``normal`` on ``rank``, of at most ``most`` tokens from each rank."""
        ends = normal[0][:, rank].contiguous()
        row = torch.arange(len(recv_topk_idx), device=ends.device)
        source = torch.searchsorted(ends.long(), row, right=True)
        number = source * most + normal[3]
        choices = slots.of_choice if do_expand else torch.full_like(slots.of_choice, -1)
        return cls(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=most,
            num_sms=NormalMode.num_sms,
            topk_idx=topk_idx,
            num_recv_tokens=len(recv_topk_idx),
            num_expanded_tokens=slots.rows if do_expand else 0,
            num_recv_tokens_per_expert_list=counts,
            psum_num_recv_tokens_per_scaleup_rank=ends,
            psum_num_recv_tokens_per_expert=slots.ends if do_expand else slots.aligned.cumsum(0).to(torch.int32),
            num_unaligned_recv_tokens_per_expert=slots.counts,
            recv_src_metadata=torch.cat([torch.stack([number, row], 1).to(torch.int32), choices], 1),
            dst_buffer_slot_idx=normal[5],
            token_metadata_at_forward=None,
            channel_linked_list=None,
            normal=normal,
            recv_topk_idx=recv_topk_idx,
            slots=slots,
        )


def check_is_handle(handle: object) -> None:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle must be the EPHandle that a dispatch returned, got {type(handle).__name__}")
