"""The low-latency interface of DeepEP over an :class:`eep.Buffer` in the ``expert`` layout.

``from eep.compat.deep_ep import Buffer`` takes the place of ``from deep_ep import Buffer`` where only the
low-latency calls are used: names, arguments, shapes and types are DeepEP's. Rows of an expert that count come
first, by source rank and then by token. This is different:

* **Faults.** A rank that does not answer within ``timeout_ms`` is dropped whole: its tokens are absent, its
  mask is 1, and the step is not to be trusted. Only calls in which ranks meet raise because of a peer (the
  first dispatch, ``connect_ranks``, ``barrier``), after a minute.
* **The mask is the membership.** Changing it begins a new epoch, which abandons the dispatches in flight and
  forgets who was dropped. All ranks that stay make the same changes, in the same order, between the same two
  steps. A masked rank comes back only as a new process; nothing that the old one writes is read again.
* **Sizes come with the first dispatch.** It, and a later one with other sizes, is collective: memory is made
  and all ranks meet. ``clean_low_latency_buffer`` does that ahead of time. Byte sizes, queue pairs and NVLink
  options are accepted and not needed. K is at most 16 and the same on all ranks.
* **Two dispatches in flight**, a third one raises; a dispatch is over with its combine. They take turns on
  two sets of tensors, so that what one returned stands until the one after the next.
* ``handle[0]`` is how combine finds its dispatch: hand on that very tensor, not a copy.
* **CPU or GPU.** Memory is made where the tokens of the first dispatch are. On a GPU calls are work of the
  current stream and may be captured in a graph once the memory is there; a ``topk_idx`` of combine that
  names other experts than the dispatch is then not noticed.

The process group (gloo, or another that carries CPU tensors) only serves the constructor, to agree on a
rendezvous directory on this host. Variables of the environment make an instance elastic; the first is set for
all ranks or for none:

* ``EEP_RENDEZVOUS``: the directory. Without it rank 0 makes one, named by ``Buffer.rendezvous``, and removes
  it in the end; an instance that is to outlive its rank 0 is given one.
* ``EEP_RANK``, ``EEP_WORLD_SIZE``: for a process that joins later, whose group holds only itself or is None:
  which rank it is, and how many the instance was launched with. Its first dispatch (or
  ``clean_low_latency_buffer``) joins, and waits until the others have called ``connect_ranks`` with its rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import eep
from eep import native
from eep.errors import EepError
from eep.received import ExpertTokens
from eep.rendezvous import Rendezvous

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
Hook = Callable[[], None]

_PATIENCE_S = 60.0  # for ranks that are still starting; a dispatch has its own, much shorter deadline
_PATH_BYTES = 256
_CHANNELS = 2
_WIRE = "bf16"  # the widest; each dispatch says what it sends


class EventOverlap:
    """What another stream would wait for. On CPU a call is done when it returns: there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def current_stream_wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class Buffer:
    """One rank. The capacity is ``max_ranks``, or the size of the group, over which experts are spread."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        max_ranks: int | None = None,
        timeout_ms: float = 1000,
    ) -> None:
        _refuse(comm is not None, "comm", "give a torch.distributed process group")
        given = os.environ.get("EEP_RENDEZVOUS")
        self._joins = bool(given and "EEP_RANK" in os.environ and (group is None or group.size() == 1))
        if self._joins:
            self.rank, self.group_size = _number_of("EEP_RANK"), _number_of("EEP_WORLD_SIZE")
        elif group is not None:
            self.rank, self.group_size = group.rank(), group.size()
        else:
            raise ValueError("without a group, set EEP_RENDEZVOUS, EEP_RANK and EEP_WORLD_SIZE in the environment")
        self.max_ranks = self.group_size if max_ranks is None else max_ranks
        if not max(self.rank + 1, self.group_size) <= self.max_ranks:
            raise ValueError(f"max_ranks is {max_ranks}: too few for rank {self.rank} of {self.group_size}")
        if not 0 < timeout_ms < 1e9:
            raise ValueError(f"timeout_ms must be positive, got {timeout_ms}")
        self.explicitly_destroy = explicitly_destroy
        self._timeout_ms = timeout_ms
        self._inner: eep.Buffer | None = None
        self._flights: dict[int, ExpertTokens] = {}  # dispatches that wait for their combine, by channel
        self._turn = 0
        self._open = contextlib.ExitStack()
        # Also called when the process ends, while the threads that closing waits for still run.
        self._end = weakref.finalize(self, self._open.close)
        self.rendezvous = Rendezvous(given).path if given else self._agree(group)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes of address space that a rank of ``num_ranks`` shares, for any K; memory follows use."""
        experts, wire = _local_experts(num_experts, num_ranks), native.TYPES[_WIRE]
        sizes = (num_ranks, num_max_dispatch_tokens_per_rank, hidden, native.MAX_TOPK, experts)
        at, library = native.RegionLayout(), native.load()
        shape = native.Shape(*sizes, native.LAYOUTS["expert"], wire, wire, _CHANNELS)
        native.check(library, library.eep_region_layout_compute(shape, at))
        return int(at.total_bytes)

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
        """``(recv_x, packed_recv_count, handle, event, hook)``; where there is a hook, it fills them.

        With L local experts, R ranks of capacity, T tokens at most and H hidden, ``recv_x`` is bf16
        ``[L, R*T, H]``, or a pair of fp8 and its scales, column-major: fp32 ``[L, R*T, H/128]`` or, with
        ``use_ue8m0``, four exponents to an int32 ``[L, R*T, H/512]``.
        """
        _refuse(dispatch_wait_recv_cost_stats is not None, "dispatch_wait_recv_cost_stats", "pass None")
        _refuse(async_finish and return_recv_hook, "async_finish with return_recv_hook", "choose one")
        if use_fp8 and use_ue8m0 and not round_scale:
            raise ValueError("use_ue8m0 sends powers of two: it needs round_scale as well")
        wire = _WIRE if not use_fp8 else "fp8_ue8m0" if use_ue8m0 else "fp8_pow2" if round_scale else "fp8"
        device = x.device
        _check(device, "x", x, torch.bfloat16, None, None)
        _check(device, "topk_idx", topk_idx, torch.int64, len(x), None)
        if len(x) > (limit := num_max_dispatch_tokens_per_rank):
            raise ValueError(f"x has {len(x)} tokens, more than num_max_dispatch_tokens_per_rank, {limit}")
        if (stats := cumulative_local_expert_recv_stats) is not None:
            local_experts = _local_experts(num_experts, self.group_size)
            _check(device, "cumulative_local_expert_recv_stats", stats, torch.int32, local_experts)
        if len(self._flights) == _CHANNELS:
            raise EepError("two dispatches are in flight already; combine one of them before the next")

        inner = self._sized(limit, x.shape[1], num_experts, device)
        # In turns even when both are free: peers that are slower to finish a combine take the same one.
        channel = self._turn if self._turn not in self._flights else 1 - self._turn
        sent = inner.dispatch_send(x, topk_idx.clone(), channel=channel, wire=wire)
        tokens = inner.tokens_of(sent)
        assert isinstance(tokens, ExpertTokens)
        # Memory of the channel, but an object of this dispatch alone, so that its handle can be told by it.
        tokens = dataclasses.replace(tokens, src_info=tokens.src_info.view_as(tokens.src_info))
        self._flights[channel], self._turn = tokens, 1 - channel

        def receive() -> None:
            self._find(tokens.src_info)
            inner.dispatch_recv(sent)
            if stats is not None:
                stats.add_(tokens.expert_counts)

        if not return_recv_hook:
            receive()
        recv_x = tokens.x if tokens.scales is None else (tokens.x, tokens.scales)
        handle = (tokens.src_info, tokens.layout_range, limit, inner.hidden, num_experts)
        return recv_x, tokens.expert_counts, handle, EventOverlap(device), receive if return_recv_hook else None

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
        """``(combined_x, event, hook)``: for each token the weighted sum over its experts, bf16.

        With ``zero_copy`` the outputs are those in :meth:`get_next_low_latency_combine_buffer`, and of ``x``
        only the shape counts. ``topk_idx`` is that of the dispatch; -1 in more places leaves those out.
        """
        _refuse(use_logfmt, "use_logfmt", "expert outputs travel as bf16: pass False")
        _refuse(combine_wait_recv_cost_stats is not None, "combine_wait_recv_cost_stats", "pass None")
        _refuse(async_finish and return_recv_hook, "async_finish with return_recv_hook", "choose one")
        # Everything is checked before anything is sent: half a combine could not be taken back.
        inner, tokens = self._find(handle[0])
        dispatched, device = tokens.sent.topk_idx, inner.device
        _check(device, "x", x, torch.bfloat16, *tokens.x.shape)
        _check(device, "topk_idx", topk_idx, torch.int64, *dispatched.shape)
        _check(device, "topk_weights", topk_weights, torch.float32, *dispatched.shape)
        # To look at values on a GPU would be to wait for it.
        if device.type == "cpu" and not ((topk_idx == dispatched) | (topk_idx == -1)).all():
            raise ValueError("topk_idx names experts to which the dispatch of this handle did not send the token")
        if out is None:
            out = torch.empty(len(dispatched), inner.hidden, dtype=torch.bfloat16, device=device)
        _check(device, "out", out, torch.bfloat16, len(dispatched), inner.hidden)
        sent = dataclasses.replace(tokens.sent, topk_idx=topk_idx, topk_weights=topk_weights)
        inner.combine_send(inner.combine_input(sent.channel) if zero_copy else x, tokens)

        def receive() -> None:
            self._find(tokens.src_info)
            inner.combine_recv(sent, out=out)
            del self._flights[sent.channel]

        if not return_recv_hook:
            receive()
        return out, EventOverlap(device), receive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Where experts may write their outputs, bf16 ``[L, R*T, H]``, for a combine with ``zero_copy``."""
        inner, tokens = self._find(handle[0])
        return inner.combine_input(tokens.sent.channel)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Makes the memory for these sizes if it is not there, all ranks together: on the GPU if there is one and no
        dispatch has said otherwise. Flags need no cleaning."""
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(default) if self._inner is None else self._inner.device
        self._sized(num_max_dispatch_tokens_per_rank, hidden, num_experts, device)

    # ---- who is in ----

    def connect_ranks(self, ranks: Iterable[int], activate: bool = True) -> None:
        """Lets new processes of ``ranks`` in, and waits until every member has done so and they have joined.

        ``activate=False`` leaves them masked until ``low_latency_update_mask_buffer(rank, False)``: there is
        nothing to prepare before that. A process that joins does so in its first dispatch, not here.

        After :class:`eep.PeerUnreachable` all is as before; after :class:`eep.StepFailed` the mask tells who
        did not come along.
        """
        self._check_open()
        if activate and not self._joins:
            inner = self._connected()
            inner.connect_ranks(ranks, timeout=_PATIENCE_S)
            self._abandon()
            inner.barrier(_PATIENCE_S)

    def disconnect_ranks(self, ranks: Iterable[int]) -> None:
        """Lets ``ranks`` go: they are masked."""
        inner = self._connected()
        inner.disconnect_ranks(ranks)
        self._abandon()

    def low_latency_update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        """Masks a rank (:meth:`disconnect_ranks`) or unmasks it (:meth:`connect_ranks`)."""
        (self.disconnect_ranks if mask else self.connect_ranks)([rank])

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills int32 ``[max_ranks]``: 1 for ranks that are not in or were dropped since the last change."""
        self._check_open()
        _check(mask_status.device, "mask_status", mask_status, torch.int32, self.max_ranks)
        if mask_status.is_cuda:
            torch.cuda.current_stream().synchronize()  # what was dispatched so far counts
        alive = set(range(self.group_size))
        if self._inner is not None:
            status = self._inner.status()
            alive = {*self._inner.view.active} - {*status.suspects, *status.corrupt}
        mask_status.copy_(torch.tensor([rank not in alive for rank in range(self.max_ranks)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Forgets who was dropped, in a new epoch of the same members. Who was masked stays masked."""
        self._check_open()
        if self._inner is not None:
            self._inner.connect_ranks(())
            self._abandon()

    def barrier(self) -> None:
        """Waits for every rank that is not masked. Raises :class:`eep.StepFailed` if one does not come, or if
        steps since the last change of the mask are not to be trusted."""
        self._connected().barrier(_PATIENCE_S)

    def destroy(self) -> None:
        """Gives up the rank and its memory now rather than when the buffer is no longer used."""
        if not self.explicitly_destroy:
            raise EepError("destroy() needs a buffer made with explicitly_destroy=True; this one ends by itself")
        self._end()
        self._inner = None
        self._abandon()

    # ---- inside ----

    def _agree(self, group: dist.ProcessGroup | None) -> pathlib.Path:
        """Rank 0 makes the rendezvous and tells the others where it is."""
        told = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
        try:
            if self.rank == 0:
                path = os.fsencode(self._open.enter_context(Rendezvous.temporary()).path)
                told[: len(path)] = torch.tensor(list(path), dtype=torch.uint8)
        finally:  # nobody is left waiting, whatever went wrong
            dist.broadcast(told, group=group, group_src=0)
        if not told.any():
            raise EepError("rank 0 could not make a rendezvous directory; its own error says why")
        return pathlib.Path(os.fsdecode(bytes(told.tolist()).rstrip(b"\0")))

    def _sized(self, max_tokens: int, hidden: int, num_experts: int, device: torch.device) -> eep.Buffer:
        """The inner buffer for these sizes on such a device, made and connected if need be."""
        self._check_open()
        local_experts, old = _local_experts(num_experts, self.group_size), self._inner
        if old is not None:
            fits = (old.max_tokens, old.hidden, old.local_experts) == (max_tokens, hidden, local_experts)
            if fits and old.device.type == device.type:
                return old
            if self._flights:
                raise EepError("the sizes change while a dispatch is in flight; combine it first")
        inner = eep.Buffer(
            self.rank,
            # A place for each choice of sizes: a peer that still has its old memory is not found by mistake.
            rendezvous=self.rendezvous / f"tokens{max_tokens}-hidden{hidden}-experts{local_experts}-{device.type}",
            max_ranks=self.max_ranks,
            max_tokens=max_tokens,
            hidden=hidden,
            topk=native.MAX_TOPK,
            local_experts=local_experts,
            layout="expert",
            wire=_WIRE,
            channels=_CHANNELS,
            device=device.type,
            timeout_ms=self._timeout_ms,
        )
        try:
            if self._joins:
                inner.join(timeout=_PATIENCE_S)
            else:
                members = range(self.group_size) if old is None else old.view.active
                inner.connect_ranks(members, timeout=_PATIENCE_S)
            inner.barrier(_PATIENCE_S)  # so that no deadline runs against a rank that is still starting
        except BaseException:
            inner.close()
            raise
        self._open.callback(inner.close)
        self._inner, self._joins = inner, False
        self._abandon()
        if old is not None:
            old.close()
            inner.barrier(_PATIENCE_S)  # nobody goes back to the old sizes while a peer is still there
        return inner

    def _abandon(self) -> None:
        # A new view begins: all ranks start from the same channel again, those that have just joined too.
        self._flights.clear()
        self._turn = 0

    def _find(self, src_info: torch.Tensor) -> tuple[eep.Buffer, ExpertTokens]:
        """The dispatch in flight that ``src_info`` stands for."""
        inner = self._connected()
        for tokens in self._flights.values():
            if tokens.src_info is src_info:
                return inner, tokens
        raise EepError(
            "no dispatch in flight belongs to this handle or hook: it was combined already, or abandoned "
            "when a rank came or went; dispatch again"
        )

    def _connected(self) -> eep.Buffer:
        self._check_open()
        if self._inner is None:
            raise EepError("there is no memory yet; call clean_low_latency_buffer with the sizes first")
        return self._inner

    def _check_open(self) -> None:
        if not self._end.alive:
            raise EepError("this buffer was destroyed")


def _local_experts(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts must be a multiple of the {num_ranks} ranks, got {num_experts}")
    return num_experts // num_ranks


def _check(device: torch.device, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    sizes = [got if want is None else want for want, got in zip(shape, tensor.shape, strict=False)]
    if len(shape) != tensor.dim() or sizes != list(tensor.shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be of shape [{wanted}], got {list(tensor.shape)}")
    if tensor.device.type != device.type or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on {device.type}; copy it there, or call .contiguous() on it")


def _refuse(is_used: bool, name: str, instead: str) -> None:
    if is_used:
        raise EepError(f"{name} is not supported by eep.compat.deep_ep; {instead}")


def _number_of(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ValueError(f"a process that joins needs a number in {variable} of the environment, got {value!r}")
    return int(value)
