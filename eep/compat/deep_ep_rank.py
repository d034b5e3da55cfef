"""A rank behind DeepEP's interface: its rendezvous, its memory, its membership, and the dispatches in flight."""

from __future__ import annotations

import contextlib
import os
import pathlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

import eep
from eep.abi import native
from eep.compat.checks import check_tensor, local_experts_of, number_of, refuse
from eep.data_plane.rendezvous import Rendezvous
from eep.data_plane.token_buffer import SplitTokenBuffer
from eep.data_plane.tokens import ExpertTokens
from eep.errors import EepError

PATIENCE_S = 60.0
"""How long to wait for ranks that are still starting. A dispatch has its own, much shorter deadline."""
CHANNELS = 2
WIRE = "bf16"
"""The widest format, for which memory is made. Each dispatch says what it sends."""
_PATH_BYTES = 256


class DeepEpRank:
    """One rank. Experts are spread over the group; ``max_ranks`` (default: the size of the group) is the capacity."""

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
        refuse(comm is not None, "comm", "give a torch.distributed process group")
        given = os.environ.get("EEP_RENDEZVOUS")
        self._joins = bool(given and "EEP_RANK" in os.environ and (group is None or group.size() == 1))
        if self._joins:
            self.rank, self.group_size = number_of("EEP_RANK"), number_of("EEP_WORLD_SIZE")
        elif group is not None:
            self.rank, self.group_size = group.rank(), group.size()
        else:
            raise ValueError(
                "pass a process group, or set EEP_RENDEZVOUS, EEP_RANK and EEP_WORLD_SIZE in the environment"
            )
        self.max_ranks = self.group_size if max_ranks is None else max_ranks
        if not max(self.rank + 1, self.group_size) <= self.max_ranks:
            raise ValueError(f"max_ranks is {max_ranks}, too few for rank {self.rank} of {self.group_size}; raise it")
        if not 0 < timeout_ms < 1e9:
            raise ValueError(f"timeout_ms must be positive, got {timeout_ms}")
        self.explicitly_destroy = explicitly_destroy
        self._timeout_ms = timeout_ms
        self._inner: eep.Buffer | None = None
        self._flights: dict[int, ExpertTokens] = {}  # dispatches that wait for their combine, by channel
        self._turn = 0
        self._open = contextlib.ExitStack()
        # The finalizer also runs when the process ends, while the threads that closing waits for still run.
        self._end = weakref.finalize(self, self._open.close)
        self.rendezvous = Rendezvous(given).path if given else self._agree(group)

    # ---- who is in ----

    def connect_ranks(self, ranks: Iterable[int], activate: bool = True) -> None:
        """Admits new processes of ``ranks``. Waits until every member has done so and the joiners have joined.

        ``activate=False`` leaves them masked until ``low_latency_update_mask_buffer(rank, False)``: there is
        nothing to prepare before that. A joiner joins in its first dispatch, not here.

        After :class:`eep.PeerUnreachable` nothing has changed. After :class:`eep.StepFailed` the mask names the
        ranks that did not take part.
        """
        self._check_open()
        if activate and not self._joins:
            inner = self._connected()
            inner.connect_ranks(ranks, timeout=PATIENCE_S)
            self._abandon()
            inner.barrier(PATIENCE_S)

    def disconnect_ranks(self, ranks: Iterable[int]) -> None:
        """Removes ``ranks``: they are masked."""
        inner = self._connected()
        inner.disconnect_ranks(ranks)
        self._abandon()

    def low_latency_update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        """Masks a rank (:meth:`disconnect_ranks`) or unmasks it (:meth:`connect_ranks`)."""
        (self.disconnect_ranks if mask else self.connect_ranks)([rank])

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills int32 ``[max_ranks]``: 1 for a rank that is not a member or was dropped since the last change."""
        self._check_open()
        check_tensor(mask_status.device, "mask_status", mask_status, torch.int32, self.max_ranks)
        if mask_status.is_cuda:
            torch.cuda.current_stream().synchronize()  # the mask shows what every dispatch so far has found
        alive = set(range(self.group_size))
        if self._inner is not None:
            status = self._inner.status()
            alive = {*self._inner.view.active} - {*status.suspects, *status.corrupt}
        mask_status.copy_(torch.tensor([rank not in alive for rank in range(self.max_ranks)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Forgets which ranks were dropped, in a new epoch of the same members. A masked rank stays masked."""
        self._check_open()
        if self._inner is not None:
            self._inner.connect_ranks(())
            self._abandon()

    def barrier(self) -> None:
        """Waits for every rank that is not masked. Raises :class:`eep.StepFailed` if one does not come, or if a
        step since the last change of the mask cannot be trusted."""
        self._connected().barrier(PATIENCE_S)

    def destroy(self) -> None:
        """Gives up the rank and its memory now, rather than when the buffer is collected."""
        if not self.explicitly_destroy:
            raise EepError(
                "destroy() needs a buffer made with explicitly_destroy=True; this one frees its memory by itself"
            )
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
        finally:  # whatever went wrong, the other ranks must not wait forever
            dist.broadcast(told, group=group, group_src=0)
        if not told.any():
            raise EepError("rank 0 could not make a rendezvous directory; read its error for the cause")
        return pathlib.Path(os.fsdecode(bytes(told.tolist()).rstrip(b"\0")))

    def _sized(self, max_tokens: int, hidden: int, num_experts: int, device: torch.device) -> eep.Buffer:
        """The inner buffer for these sizes on this kind of device; makes and connects it if there is none."""
        self._check_open()
        local_experts, old = local_experts_of(num_experts, self.group_size), self._inner
        if old is not None:
            fits = (old.max_tokens, old.hidden, old.local_experts) == (max_tokens, hidden, local_experts)
            if fits and old.device.type == device.type:
                return old
            if self._flights:
                raise EepError("the sizes change while a dispatch is in flight; combine it first")
        inner = eep.Buffer(
            self.rank,
            # One directory for each choice of sizes, so that no rank finds the old memory of a peer by mistake.
            rendezvous=self.rendezvous / f"tokens{max_tokens}-hidden{hidden}-experts{local_experts}-{device.type}",
            max_ranks=self.max_ranks,
            max_tokens=max_tokens,
            hidden=hidden,
            topk=native.MAX_TOPK,
            local_experts=local_experts,
            layout="expert",
            wire=WIRE,
            channels=CHANNELS,
            device=device.type,
            timeout_ms=self._timeout_ms,
        )
        try:
            if self._joins:
                inner.join(timeout=PATIENCE_S)
            else:
                members = range(self.group_size) if old is None else old.view.active
                inner.connect_ranks(members, timeout=PATIENCE_S)
            inner.barrier(PATIENCE_S)  # no deadline may run against a rank that is still starting
        except BaseException:
            inner.close()
            raise
        self._open.callback(inner.close)
        self._inner, self._joins = inner, False
        self._abandon()
        if old is not None:
            old.close()
            inner.barrier(PATIENCE_S)  # no rank returns to the old sizes while a peer still has them
        return inner

    def _abandon(self) -> None:
        # A new view begins: all ranks start from the same channel again, joiners too.
        self._flights.clear()
        self._turn = 0

    def _find(self, src_info: torch.Tensor) -> tuple[SplitTokenBuffer, ExpertTokens]:
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
            raise EepError("this buffer has no memory yet; call clean_low_latency_buffer with the sizes first")
        return self._inner

    def _check_open(self) -> None:
        if not self._end.alive:
            raise EepError("this buffer was destroyed; make a new one")
