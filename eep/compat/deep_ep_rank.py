"""A rank behind DeepEP's interface: its rendezvous, its memory, its membership, and the dispatches in flight."""

from __future__ import annotations

import contextlib
import os
import pathlib
import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
import torch.distributed as dist

import eep
from eep.abi import native
from eep.compat.agreed_memory import agree
from eep.compat.checks import check_destroy, check_tensor, device_of, is_gpu_shared, number_of, refuse, timeout_of
from eep.compat.flights import Flights
from eep.compat.masked_routes import MaskedRoutes
from eep.compat.presence import Presence
from eep.compat.sizes import CHANNELS, WIRE, Sizes, hinted
from eep.data_plane.rendezvous import Rendezvous
from eep.errors import EepError

PATIENCE_S = 60.0
"""How long to wait for ranks that are still starting. A dispatch has its own, much shorter deadline."""
TIMEOUT_MS = 1000.0


class DeepEpRank:
    """One rank. Experts are spread over the group; ``max_ranks`` (default: the size of the group) is the capacity.

    ``routes_to_masked`` (default: ``enable_shrink``) says that tokens may name experts of masked ranks, which then add
    nothing. Otherwise they add nothing either, but the step is not to be trusted, and ``barrier`` says so. ``shares_gpu``
    (default: as ``EEP_SHARES_GPU`` says) is that of :class:`eep.Buffer`.
    """

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
        timeout_ms: float | None = None,
        routes_to_masked: bool | None = None,
        shares_gpu: bool | None = None,
    ) -> None:
        refuse(comm is not None, "comm", "give a torch.distributed process group")
        given = os.environ.get("EEP_RENDEZVOUS")
        # Ranks that know where to meet need no words with each other: then whatever tells rank and size will do.
        counts = given and hasattr(group, "rank") and hasattr(group, "size")
        if not (group is None or counts or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group must be a process group that this rank is in, got a {type(group).__name__}")
        self._joins = bool(given and "EEP_RANK" in os.environ and (group is None or group.size() == 1))
        if self._joins:
            rank, group_size = number_of("EEP_RANK"), number_of("EEP_WORLD_SIZE")
        elif group is not None:
            rank, group_size = group.rank(), group.size()
        else:
            raise ValueError(
                "pass a process group, or set EEP_RENDEZVOUS, EEP_RANK and EEP_WORLD_SIZE in the environment"
            )
        # Programs ask for these to find out whether the buffer that they have will do.
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self._begin(rank, group_size, max_ranks, explicitly_destroy, timeout_ms, shares_gpu)
        self._routes_to_masked = enable_shrink if routes_to_masked is None else routes_to_masked
        try:
            self._enter(group, Rendezvous(given).path if given else None, num_rdma_bytes)
        except BaseException:
            self._end()
            raise

    def _begin(
        self,
        rank: int,
        group_size: int,
        max_ranks: int | None,
        explicitly_destroy: bool,
        timeout_ms: float | None,
        shares_gpu: bool | None = None,
    ) -> None:
        """A rank that has neither met others nor made anything."""
        self.rank, self.group_size = rank, group_size
        self.max_ranks = group_size if max_ranks is None else max_ranks
        if not max(rank + 1, group_size) <= self.max_ranks:
            raise ValueError(f"max_ranks is {max_ranks}, too few for rank {rank} of {group_size}; raise it")
        self.explicitly_destroy = explicitly_destroy
        self._timeout_ms = timeout_of(timeout_ms, TIMEOUT_MS)
        self._shares_gpu = is_gpu_shared(shares_gpu)
        self._inner: eep.Buffer | None = None
        self._joins_with: Sizes | None = None
        self._flights = Flights()
        self._masked_routes: MaskedRoutes | None = None
        self._open = contextlib.ExitStack()
        # The finalizer also runs when the process ends, while the threads that closing waits for still run.
        self._end = weakref.finalize(self, _close, self._open, os.getpid())

    @property
    def runtime(self) -> Self | None:
        """What DeepEP has behind a buffer: here the buffer itself, and None once it was destroyed."""
        return self if self._end.alive else None

    # ---- who is in ----

    def connect_ranks(self, ranks: Iterable[int], activate: bool = True) -> None:
        """Admits new processes of ``ranks``. Waits until every member has done so and the joiners have joined.

        ``activate=False`` leaves them masked until ``low_latency_update_mask_buffer(rank, False)``: there is
        nothing to prepare before that. A joiner that was made with the size hint joins here, whichever ranks it names;
        one that does not know its sizes yet, in its first dispatch.

        After :class:`eep.PeerUnreachable` nothing has changed. After :class:`eep.StepFailed` the mask names the
        ranks that did not take part.
        """
        self._check_open()
        if not activate:
            return
        if self._joins:
            if self._joins_with is not None:
                self._sized(self._joins_with, default_device())
        else:
            inner = self._connected()
            inner.connect_ranks(ranks, timeout=PATIENCE_S)
            self._view_changed()
            self._meet(inner)

    def disconnect_ranks(self, ranks: Iterable[int]) -> None:
        """Removes ``ranks``: they are masked."""
        inner = self._connected()
        inner.disconnect_ranks(ranks)
        self._view_changed()

    def low_latency_update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        """Masks a rank (:meth:`disconnect_ranks`) or unmasks it (:meth:`connect_ranks`)."""
        (self.disconnect_ranks if mask else self.connect_ranks)([rank])

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills int32 ``[max_ranks]``: 1 for a rank that is not a member or was dropped since the last change."""
        self._check_open()
        check_tensor(device_of("mask_status", mask_status), "mask_status", mask_status, torch.int32, self.max_ranks)
        if mask_status.is_cuda:
            torch.cuda.current_stream().synchronize()  # the mask shows what every dispatch so far has found
        members = range(self.group_size) if self._inner is None else self._inner.view.active
        alive = set(members) - self._missing()
        masked = [rank not in alive for rank in range(self.max_ranks)]
        mask_status.copy_(torch.tensor(masked, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Forgets which ranks were dropped, in a new epoch of the same members. A masked rank stays masked."""
        self._check_open()
        if self._inner is not None:
            self._inner.connect_ranks(())
            self._view_changed()

    def barrier(self) -> None:
        """Waits for every rank that is not masked. Raises :class:`eep.StepFailed` if one does not come, or if a
        step since the last change of the mask cannot be trusted."""
        self._meet(self._connected())

    def destroy(self) -> None:
        """Gives up the rank and its memory now, rather than when the buffer is collected."""
        check_destroy(self.explicitly_destroy)
        self._end()
        self._inner = None
        self._view_changed()

    # ---- inside ----

    def _enter(self, group: dist.ProcessGroup | None, place: pathlib.Path | None, num_rdma_bytes: int) -> None:
        """Finds the other ranks, and makes the memory if it is known for which sizes."""
        speaks = not self._joins and isinstance(group, dist.ProcessGroup)
        sizes, asks = hinted(num_rdma_bytes), speaks and (place is None or num_rdma_bytes > 0)
        if asks:
            place, sizes = agree(group, place, sizes, self._open)
        assert place is not None
        self.rendezvous = place
        try:
            self._presence = Presence(place / "ranks", self.rank)
            self._open.callback(self._presence.close)
        finally:
            if asks and sizes is None:
                dist.barrier(group=group)  # rank 0 may leave, and remove the directory, when all are in it
        if self._joins:
            self._joins_with = sizes
        elif sizes is not None:
            self._sized(sizes, default_device())

    def _sized(self, sizes: Sizes, device: torch.device) -> eep.Buffer:
        """The inner buffer for these sizes on this kind of device; makes and connects it if there is none."""
        self._check_open()
        old = self._inner
        if old is not None:
            fits = Sizes(old.max_tokens, old.hidden, old.local_experts) == sizes
            if fits and old.device.type == device.type:
                return old
        inner = self._make(sizes, device)
        try:
            if self._joins:
                inner.join(timeout=PATIENCE_S)
            else:
                members = tuple(range(self.group_size)) if old is None else old.view.active
                connect = inner.connect_ranks
                self._presence.patiently(members, PATIENCE_S, lambda seconds: connect(members, timeout=seconds))
            self._meet(inner)  # no deadline may run against a rank that is still starting
        except BaseException:
            inner.close()
            raise
        self._joins = False
        self._take(inner)
        if old is not None:
            old.close()
            self._meet(inner)  # no rank returns to the old sizes while a peer still has them
        return inner

    def _make(self, sizes: Sizes, device: torch.device) -> eep.Buffer:
        """Memory for these sizes, which no other rank maps yet."""
        return eep.Buffer(
            self.rank,
            rendezvous=self._directory(sizes, device),
            max_ranks=self.max_ranks,
            max_tokens=sizes.max_tokens,
            hidden=sizes.hidden,
            topk=native.MAX_TOPK,
            local_experts=sizes.local_experts,
            layout="expert",
            wire=WIRE,
            channels=CHANNELS,
            device=device.type,
            timeout_ms=self._timeout_ms,
            shares_gpu=self._shares_gpu,
        )

    def _directory(self, sizes: Sizes, device: torch.device) -> pathlib.Path:
        """One for each choice of sizes, so that no rank finds the old memory of a peer by mistake."""
        of_sizes = f"tokens{sizes.max_tokens}-hidden{sizes.hidden}-experts{sizes.local_experts}-{device.type}"
        return self.rendezvous / of_sizes

    def _take(self, inner: eep.Buffer) -> None:
        """From now on tokens go through ``inner``."""
        self._open.callback(inner.close)
        self._inner = inner
        if self._routes_to_masked:
            self._masked_routes = MaskedRoutes(self.max_ranks, inner.local_experts, inner.device)
        self._view_changed()

    def _meet(self, inner: eep.Buffer) -> None:
        """A barrier that does not wait for a rank that is gone."""
        with self._presence.watching(inner.view.active, inner):
            inner.barrier(PATIENCE_S)

    def _view_changed(self) -> None:
        """What was in flight is lost. Routes follow the members."""
        self._flights.clear()
        if self._masked_routes is not None and self._inner is not None:
            self._masked_routes.show(self._inner.view)

    def _missing(self) -> set[int]:
        """The members that were dropped since the last change of the mask."""
        if self._inner is None:
            return set()
        status = self._inner.status()
        return {*status.suspects, *status.corrupt}

    def _connected(self) -> eep.Buffer:
        self._check_open()
        if self._inner is None:
            raise EepError("this buffer has no memory yet; call clean_low_latency_buffer with the sizes first")
        return self._inner

    def _check_open(self) -> None:
        if not self._end.alive:
            raise EepError("this buffer was destroyed; make a new one")


def default_device() -> torch.device:
    """Where memory is made that no tensor has asked for yet: on the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _close(opened: contextlib.ExitStack, process: int) -> None:
    """Not in a fork of the process that opened it: that one goes on with it."""
    if os.getpid() == process:
        opened.close()
