"""DeepEP's normal mode, which is for prefill and training: any number of tokens, within one host.

Rows arrive in the order of source ranks, then of tokens, and sums are taken in rank order, in fp32: the same bits on every
run. The calls run on the current stream, and a dispatch waits for the counts on the host. So it cannot be captured, with
``num_worst_tokens`` neither. A rank that does not answer within ``timeout_ms`` ends the call with :class:`eep.StepFailed`. On
a GPU a combine does not raise; the mask shows who was missed.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, NoReturn

import torch

from eep.compat.checks import check_handle, check_tensor, device_of, local_experts_of
from eep.compat.config import Config
from eep.compat.deep_ep_rank import PATIENCE_S, DeepEpRank, default_device
from eep.compat.normal_layout import (
    NormalHandle,
    Routes,
    Tokens,
    dispatch_layout,
    local_choices,
    make_handle,
    padded,
    parts_of,
    sum_by_token,
)
from eep.compat.rows import RowExchange
from eep.compat.stream_events import EventOverlap, after, wait_for
from eep.errors import EepError

Dispatched = tuple[
    Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
]


class NormalMode(DeepEpRank):
    """The calls of normal mode. Its settings are kept and have no effect."""

    num_sms: ClassVar[int] = 20
    _exchange: tuple[tuple[Any, ...], RowExchange] | None = None
    """The last one, and the view that it is of."""

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Kept for :class:`Config`; kernels take what they need."""
        if new_num_sms < 0 or new_num_sms % 2:
            raise ValueError(f"the number of multiprocessors must be even, got {new_num_sms}")
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        return Config(cls.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Returns ``(num_tokens_per_rank, None, num_tokens_per_expert, is_token_in_rank, event)``."""
        self._check_open()
        local_experts_of(num_experts, self.group_size)
        check_tensor(device_of("topk_idx", topk_idx), "topk_idx", topk_idx, torch.int64, None, None)
        if (
            topk_idx.device.type == "cpu"
            and topk_idx.numel()
            and not -1 <= topk_idx.min() <= topk_idx.max() < num_experts
        ):
            raise ValueError(f"topk_idx names experts outside -1..{num_experts - 1}")
        wait_for(previous_event)
        per_rank, per_expert, is_token_in_rank = dispatch_layout(topk_idx, num_experts, self.group_size)
        return per_rank, None, per_expert, is_token_in_rank, after(topk_idx.device)

    def dispatch(
        self,
        x: Tokens,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """Returns ``(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)``. With the
        handle of an earlier dispatch, ``x`` goes the same ways again, and only ``recv_x`` and ``event`` are returned."""
        data, scales = parts_of(x)
        device, tokens = data.device, len(data)
        check_tensor(device, "x", data, torch.bfloat16 if scales is None else torch.float8_e4m3fn, None, None)
        if scales is not None and (scales.dim() != 2 or len(scales) != tokens or scales.device != device):
            raise ValueError(f"the scales must be of shape [{tokens}, any], beside x, got {list(scales.shape)}")
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx and topk_weights go together; pass both, or neither")
        if expert_alignment < 1 or num_worst_tokens < 0:
            raise ValueError(f"expert_alignment is {expert_alignment} and num_worst_tokens {num_worst_tokens}")
        if handle is not None:
            check_handle(handle, 6)
            if topk_idx is not None:
                raise ValueError("a dispatch with a handle sends no topk_idx: it goes where the first one went")
            check_tensor(device, "is_token_in_rank of the handle", handle[4], torch.bool, tokens, self.group_size)
            wait_for(previous_event)
            rows, routes = self._rows(device), Routes.of_handle(handle, self.rank)
            sent = (data, scales)
            received = [self._send(rows, each, routes) for each in sent if each is not None]
            rows.check()
            again = tuple(padded(each, len(handle[3]), 0) for each in received)
            return again if len(again) == 2 else again[0], None, None, None, None, after(device, *sent)

        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ValueError("a dispatch without a handle needs the three tensors that get_dispatch_layout returns")
        check_tensor(device, "num_tokens_per_rank", num_tokens_per_rank, torch.int32, self.group_size)
        check_tensor(device, "is_token_in_rank", is_token_in_rank, torch.bool, tokens, self.group_size)
        check_tensor(device, "num_tokens_per_expert", num_tokens_per_expert, torch.int32, None)
        if topk_idx is not None and topk_weights is not None:
            check_tensor(device, "topk_idx", topk_idx, torch.int64, tokens, None)
            check_tensor(device, "topk_weights", topk_weights, torch.float32, *topk_idx.shape)
        local_experts = local_experts_of(len(num_tokens_per_expert), self.group_size)
        if device.type == "cpu" and not torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0, dtype=torch.int32)):
            raise ValueError("num_tokens_per_rank does not count the tokens of is_token_in_rank")

        wait_for(previous_event)
        rows = self._rows(device)
        reached = is_token_in_rank & self._reached(device)
        table = rows.gather(torch.cat([reached.sum(0, dtype=torch.int32), num_tokens_per_expert]))
        prefix = table[:, : self.group_size].cumsum(0, dtype=torch.int32)
        routes = Routes.of(reached, prefix, self.rank)
        first = self.group_size + self.rank * local_experts
        per_expert = table[:, first : first + local_experts].sum(0).tolist()
        received = [self._send(rows, each, routes) for each in (data, scales) if each is not None]
        idx = weights = None
        if topk_idx is not None and topk_weights is not None:
            idx, weights = local_choices(
                self._send(rows, topk_idx, routes), self._send(rows, topk_weights, routes), self.rank, local_experts
            )
        source = self._send(rows, torch.arange(tokens, dtype=torch.int32, device=device), routes)
        rows.check()
        if num_worst_tokens and num_worst_tokens < routes.received:
            raise EepError(f"{routes.received} tokens came; num_worst_tokens allows {num_worst_tokens}")
        if num_worst_tokens:
            received = [padded(each, num_worst_tokens, 0) for each in received]
            source, idx = (
                padded(source, num_worst_tokens, -1),
                None if idx is None else padded(idx, num_worst_tokens, -1),
            )
            weights = None if weights is None else padded(weights, num_worst_tokens, 0)
        aligned = [-(-count // expert_alignment) * expert_alignment for count in per_expert]
        return (
            (received[0], received[1]) if scales is not None else received[0],
            idx,
            weights,
            [] if num_worst_tokens else aligned,
            make_handle(routes, prefix, source),
            after(device, data, scales, topk_idx, topk_weights),
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Returns ``(combined_x, combined_topk_weights, event)``: for each token the sum of what the ranks gave for it,
        without weights, and of the weights. A handle may be combined any number of times."""
        check_handle(handle, 6)
        device, (_, _, _, source, is_token_in_rank, _) = device_of("x", x), handle
        tokens = len(is_token_in_rank)
        check_tensor(device, "x", x, torch.bfloat16, len(source), None)
        check_tensor(device, "is_token_in_rank of the handle", is_token_in_rank, torch.bool, None, self.group_size)
        if topk_weights is not None:
            check_tensor(device, "topk_weights", topk_weights, torch.float32, len(source), None)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        for each in biases:
            check_tensor(device, "bias", each, torch.bfloat16, tokens, x.shape[1])
        wait_for(previous_event)
        routes = Routes.of_handle(handle, self.rank)
        start = torch.zeros(tokens, x.shape[1], dtype=torch.float32, device=device)
        for each in biases:
            start += each.float()
        combined = sum_by_token(self.send_back(x, routes), routes, start).to(torch.bfloat16)
        combined_weights = None
        if topk_weights is not None:
            nothing = torch.zeros(tokens, topk_weights.shape[1], dtype=torch.float32, device=device)
            combined_weights = sum_by_token(self.send_back(topk_weights, routes), routes, nothing)
        return combined, combined_weights, after(device, x, topk_weights)

    # ---- what DeepEP's second interface asks for beside these ----

    def send_again(self, of_tokens: torch.Tensor, handle: NormalHandle) -> torch.Tensor:
        """What belongs to tokens of any type, along the ways of ``handle``."""
        rows, routes = self._rows(of_tokens.device), Routes.of_handle(handle, self.rank)
        received = self._send(rows, of_tokens, routes)
        rows.check()
        return received

    def send_back(
        self, rows: torch.Tensor, routes: Routes, sent: torch.Tensor | None = None, returned: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``rows`` of the tokens that came, to where they came from; returns those of this rank's own tokens, in the order in
        which it sent them. A token has one row, or as many as ``sent`` says of each that came, and ``returned`` of each
        that was sent."""
        there, back = (
            tokens if counts is None else [int(each.sum()) for each in torch.split(counts, tokens)]
            for tokens, counts in ((routes.receive, sent), (routes.send, returned))
        )
        return self._rows(rows.device).exchange(rows[: sum(there)], there, back)

    def meet_in_normal_mode(self) -> None:
        """Waits for every rank. Raises :class:`eep.StepFailed` if one does not come."""
        self._rows(default_device() if self._exchange is None else self._exchange[1].device).meet()

    # ---- what is not here ----

    def internode_dispatch(self, *_: Any, **__: Any) -> NoReturn:
        raise EepError("internode_dispatch: all ranks are on one host; use dispatch")

    def internode_combine(self, *_: Any, **__: Any) -> NoReturn:
        raise EepError("internode_combine: all ranks are on one host; use combine")

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> NoReturn:
        raise EepError("get_local_buffer_tensor: the memory of a rank is not one buffer; use what the calls return")

    # ---- inside ----

    def _send(self, rows: RowExchange, of_tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        return rows.exchange(of_tokens.index_select(0, routes.tokens), routes.send, routes.receive)

    def _members(self) -> list[int]:
        """The ranks that take part now. Those that were not there at the launch have no experts in normal mode."""
        active = range(self.group_size) if self._inner is None else self._inner.view.active
        return [rank for rank in active if rank < self.group_size]

    def _reached(self, device: torch.device) -> torch.Tensor:
        """Which ranks are in the view: what is meant for others is not sent."""
        members = self._members()
        return torch.tensor([rank in members for rank in range(self.group_size)], device=device)

    def _missing(self) -> set[int]:
        exchange = self._exchange
        is_of_view = exchange is not None and exchange[0] == self._view_key(exchange[1].device)
        return super()._missing() | (set(exchange[1].missing) if exchange is not None and is_of_view else set())

    def _view_key(self, device: torch.device) -> tuple[Any, ...]:
        inner = self._inner
        sizes = () if inner is None else (inner.view, inner.max_tokens, inner.hidden, inner.local_experts)
        return device.type, *sizes

    def _rows(self, device: torch.device) -> RowExchange:
        """What rows go through in the present view; made, together with the others, where there is none."""
        self._check_open()
        if self.rank >= self.group_size:
            raise EepError(f"rank {self.rank} was not there at the launch: normal mode has no experts for it")
        key, last = self._view_key(device), self._exchange
        if last is not None:
            if last[0] == key:
                return last[1]
            last[1].close()
            self._exchange = None
        exchange = RowExchange(
            self.rank,
            self._members(),
            self.group_size,
            directory=self.rendezvous / f"rows-{hashlib.blake2b(repr(key).encode(), digest_size=6).hexdigest()}",
            device=device,
            timeout_ms=self._timeout_ms,
            patience_s=PATIENCE_S,
            presence=self._presence,
        )
        self._open.callback(exchange.close)
        self._exchange = key, exchange
        return exchange
