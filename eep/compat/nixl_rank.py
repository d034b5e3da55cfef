"""A rank behind NIXL's interface. It has memory before it has peers: it is alone, and may work on its own experts.
:meth:`NixlRank.connect` finds the others.

Ranks that start together name each other and become the first view. A rank that comes later names ranks that have a view
already, and waits until they let it in. What tells the two apart is what the others want: each rank that is alone writes
down with whom it wants to begin. A rank that has disconnected all others and connects to some of them again begins another
life, with new memory.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
import uuid
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

import eep
from eep.abi.peer_table import ALONE_EPOCH
from eep.access import TEMPORARY_PREFIX, temporary_base
from eep.compat.deep_ep_rank import PATIENCE_S, default_device
from eep.compat.low_latency import DeepEpBuffer
from eep.compat.presence import Presence
from eep.compat.sizes import Sizes
from eep.data_plane.rendezvous import Rendezvous
from eep.errors import PeerUnreachable, StepFailed

_LOOK_EVERY_S = 0.02
_FIRST_EPOCH = 1
_KEY = "eep/nixl_ep/rendezvous"


class KeyStore(Protocol):
    """What of a ``torch.distributed.TCPStore`` is needed."""

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes: ...


def place_of(store: KeyStore | None, group: dist.ProcessGroup | None) -> pathlib.Path:
    """The directory in which the ranks meet: that of the environment, or one that they agree on."""
    if given := os.environ.get("EEP_RENDEZVOUS"):
        return Rendezvous(given).path
    name = uuid.uuid4().hex[:12]
    if store is not None:
        name = store.compare_set(_KEY, "", name).decode()
    elif group is not None:
        names = [""] * group.size()
        dist.all_gather_object(names, name, group=group)
        name = names[0]
    else:
        raise ValueError("pass tcp_store_group or group, or set EEP_RENDEZVOUS: the ranks must agree on a directory")
    return temporary_base() / f"{TEMPORARY_PREFIX}{name}"


class NixlRank(DeepEpBuffer):
    """One rank of a capacity of ``num_ranks``, which has memory and is alone."""

    def __init__(
        self, rank: int, num_ranks: int, sizes: Sizes, place: pathlib.Path, explicitly_destroy: bool, timeout_ms: float
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"num_ranks is {num_ranks}, too few for rank {rank}")
        self._begin(rank, num_ranks, None, explicitly_destroy, timeout_ms)
        self._joins, self._routes_to_masked, self._sizes_made = False, True, sizes
        self._unmet: frozenset[int] = frozenset()
        try:
            self.rendezvous = Rendezvous(place).path
            self._open.callback(_remove_if_last, self.rendezvous)
            self._presence = Presence(self.rendezvous / "ranks", rank)
            self._open.callback(self._presence.close)
            self._wishes = Rendezvous(self.rendezvous / "wishes").path
            self._begin_life()
        except BaseException:
            self._end()
            raise

    def _begin_life(self) -> eep.Buffer:
        """Memory under an incarnation of its own, in which the rank is alone."""
        inner = self._make(self._sizes_made, default_device())
        inner.start_alone()
        self._take(inner)
        return inner

    def connect(self, ranks: Iterable[int]) -> None:
        """Begins with ``ranks``, or lets them in, or waits to be let in by them."""
        inner, wanted = self._connected(), {*ranks, self.rank}
        self._check_capacity(wanted)
        if wanted == {self.rank}:
            return
        if inner.view.active == (self.rank,) and self._parted_from(wanted):
            inner.close()
            inner = self._begin_life()
        new = wanted - {*inner.view.active}
        if inner.view.epoch != ALONE_EPOCH:
            if not new:
                return
            deadline = time.monotonic() + PATIENCE_S
            while (parted := self._parted_from(new)) and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S)
            if parted:
                raise PeerUnreachable(
                    f"ranks {sorted(parted)} still live as they did when rank {self.rank} disconnected them; they come back "
                    "once they have disconnected all others and connect again, or as new processes"
                )
            inner.connect_ranks(new, timeout=max(0.0, deadline - time.monotonic()))
        else:
            self._begin_or_join(inner, wanted)
        self._view_changed()
        self._unmet |= new
        if inner.view.epoch == _FIRST_EPOCH:  # else a rank might end while others still look for it
            self._meet_all(inner)

    def disconnect_ranks(self, ranks: Iterable[int]) -> None:
        """Goes on without ``ranks``. Nothing changes for a rank that is alone."""
        inner, gone = self._connected(), {*ranks}
        if inner.view.epoch == ALONE_EPOCH and self.rank not in gone:
            self._check_capacity(gone)
            return
        self._await_entry(inner, gone & self._unmet)
        super().disconnect_ranks(gone)
        self._unmet -= gone

    def low_latency_clean_mask_buffer(self) -> None:
        """Forgets who did not answer. A rank that is alone has nothing to forget."""
        if self._connected().view.epoch != ALONE_EPOCH:
            super().low_latency_clean_mask_buffer()

    def barrier(self) -> None:
        super().barrier()
        self._unmet = frozenset()

    def _sized(self, sizes: Sizes, device: torch.device) -> eep.Buffer:
        inner = super()._sized(sizes, device)
        # Not in connect(): a member that leaves at the same time is disconnected only after it.
        if self._unmet:
            self._meet_all(inner)
        return inner

    def _meet_all(self, inner: eep.Buffer) -> None:
        with contextlib.suppress(StepFailed):  # the mask says who did not come
            self._meet(inner)
        self._unmet = frozenset()

    def _begin_or_join(self, inner: eep.Buffer, wanted: set[int]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        wish = self._wish(self.rank)
        fresh = wish.with_suffix(".new")
        fresh.write_text(" ".join(map(str, sorted(wanted))))
        fresh.rename(wish)  # so that it is read whole or not at all
        try:
            while True:
                with contextlib.suppress(PeerUnreachable):
                    inner.join(timeout=0.0)
                    return
                if all(self._wants(rank) == wanted for rank in wanted - {self.rank}):
                    inner.connect_ranks(wanted, timeout=max(0.0, deadline - time.monotonic()))
                    return
                # A rank that is gone may come back, and be let in with this one.
                if time.monotonic() >= deadline:
                    raise PeerUnreachable(f"ranks {sorted(wanted)} neither begin with rank {self.rank} nor let it in")
                time.sleep(_LOOK_EVERY_S)
        finally:
            wish.unlink(missing_ok=True)

    def _await_entry(self, inner: eep.Buffer, ranks: set[int]) -> None:
        """Waits until each of ``ranks`` has found the view that lets it in: once this rank has parted from it, it would look
        for that view in vain. None can be found any more when a member is gone."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._has_entered(inner, rank) for rank in ranks):
            if inner.gone_peers() or time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_EVERY_S)

    def _has_entered(self, inner: eep.Buffer, rank: int) -> bool:
        """Whether ``rank`` has found the view of ``inner``, or what it was in that view is over."""
        if Rendezvous(self._directory(self._sizes_made, inner.device)).latest(rank) != inner.view.incarnations[rank]:
            return True
        try:
            found = inner.view_of(rank).epoch
        except PeerUnreachable:
            return False
        return inner.view.epoch <= found < ALONE_EPOCH and self._wants(rank) is None

    def _parted_from(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that still live the life in which they were members here before. No rank is let in twice in one
        life: what it wrote while it was out could be taken for what it writes now."""
        inner = self._connected()
        lives = Rendezvous(self._directory(self._sizes_made, inner.device)).claimed_ranks()
        known = inner.view.incarnations
        return {rank for rank in ranks if rank not in inner.view.active and lives.get(rank, -1) == known[rank] >= 0}

    def _check_capacity(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if not 0 <= rank < self.max_ranks:
                raise ValueError(f"rank {rank} is outside the capacity of {self.max_ranks} ranks")

    def _wants(self, rank: int) -> set[int] | None:
        """With whom ``rank`` wants to begin, if it wants to."""
        try:
            return {int(each) for each in self._wish(rank).read_text().split()}
        except FileNotFoundError:
            return None

    def _wish(self, rank: int) -> pathlib.Path:
        return self._wishes / f"r{rank}.life{self._presence.life_of(rank)}"

    def _sizes(self, max_tokens: int, hidden: int, num_experts: int) -> Sizes:
        made = self._sizes_made
        if (max_tokens, hidden) != (made.max_tokens, made.hidden) or num_experts % made.local_experts:
            raise ValueError(
                f"the memory was made for {made.max_tokens} tokens of {made.hidden} and {made.local_experts} experts on "
                f"each rank, not for {max_tokens} of {hidden} and {num_experts} experts in all"
            )
        return made


def _remove_if_last(place: pathlib.Path) -> None:
    """The directory goes with the last rank, unless the user has made it."""
    if "EEP_RENDEZVOUS" in os.environ:
        return
    with Rendezvous(place / "ranks").deserted() as deserted:
        if deserted:
            Rendezvous(place).remove()
