"""Endpoint: one rank's place in an instance. Its claim, its memory, and the peer table over them.

Endpoint does not know what the ranks exchange through that memory. :class:`eep.Buffer` adds dispatch and combine,
:mod:`eep.process_group` collectives. Views are applied between steps, on every rank the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import select
from collections.abc import Iterable, Mapping
from typing import Self

import torch

from eep.abi import native
from eep.abi.collectives import OwnerState
from eep.abi.context import NativeContext
from eep.abi.peer_table import PeerTable
from eep.data_plane.memory import memory_of
from eep.data_plane.memory.exchange import CONTROL_BYTES, Offer
from eep.data_plane.memory.shm import SharedMemory
from eep.data_plane.peers import Peers
from eep.data_plane.rendezvous import Claim, NoClaim, Rendezvous
from eep.data_plane.status import QuickLook, Status, read_status, words_of
from eep.data_plane.transport.landing import Landing
from eep.data_plane.transport.remote_hosts import LinkedPeer, RemoteHosts, RemotePeers
from eep.errors import EepError
from eep.view import View


class Endpoint:
    """One rank of an instance. See :meth:`connect_ranks` for how ranks find each other."""

    shares_gpu = False
    """Whether other ranks run on the GPU of this one."""

    def __init__(
        self,
        rank: int,
        shape: native.Shape,
        *,
        rendezvous: Rendezvous | str | os.PathLike[str],
        device: str | torch.device = "cpu",
        incarnation: int | None = None,
        timeout_ms: float = 1000,
        claims: bool = True,
        hosts: RemoteHosts | None = None,
    ) -> None:
        """Claims ``rank`` and allocates what ``shape`` asks for.

        ``incarnation`` is given by a control plane; without one, the next unused number is taken. If it ``claims``
        nothing yet, another process may still be the rank: this one is alone until :meth:`claim`. ``hosts`` says which
        ranks are on other hosts and how they are reached.
        """
        self.device = torch.device(device)
        library, at = native.load(self.device.type), native.RegionLayout()
        native.check(library, library.eep_region_layout_compute(shape, at))
        self.shape, self.layout_of_region = shape, at
        if not 0 <= rank < shape.max_ranks:
            raise ValueError(f"rank {rank} is outside the capacity of {shape.max_ranks} ranks")
        if not isinstance(rendezvous, Rendezvous):
            rendezvous = Rendezvous(rendezvous)

        with contextlib.ExitStack() as undo:
            self._rendezvous = rendezvous
            self._claim: Claim | NoClaim = rendezvous.claim(rank, incarnation) if claims else NoClaim(rank)
            undo.callback(lambda: self._claim.close())
            self.region = memory_of(self.device.type).create(f"eep-region-{rank}", at.total_bytes)
            """What the peers map."""
            undo.callback(self.region.close)
            self._control = SharedMemory.create(f"eep-control-{rank}", CONTROL_BYTES)
            undo.callback(self._control.close)
            landing: Landing | None = None
            if hosts is not None and self.device.type != "cpu":
                landing = Landing(at.total_bytes)
                undo.callback(landing.close)
            self.context = NativeContext(library, shape, rank, self.region.address, self._control.address)
            """The native calls on this memory. Not after :meth:`close`."""
            undo.callback(self.context.destroy)
            self._remote: RemotePeers | None = None
            if hosts is not None:
                if landing is not None:
                    landing.serve(self.context, shape, hosts.ranks)
                self.context.page.host = _host_id(hosts.address, rendezvous.path)
                self._remote = RemotePeers(hosts, library, shape, rank, self.region, self._control, landing)
                undo.callback(self._remote.close)
            self._peers = Peers(self.context, rendezvous, self._claim, shape, self.region, self._control, self._remote)
            undo.callback(self._peers.close)
            self.status_words = words_of(self.context.page)
            """For a :class:`eep.data_plane.status.QuickLook` at several endpoints."""
            undo.callback(self.status_words.release)
            self._quick_look = QuickLook(self.status_words)
            # Before anything is let go of: a peer that waits for this rank need not wait for what will never come.
            undo.callback(self.announce, OwnerState.LEFT)
            undo.callback(self._finish_kernels)
            self.timeout_ms = timeout_ms
            self._undo: contextlib.ExitStack | None = undo.pop_all()

    # ---- who is in ----

    def claim(self, incarnation: int) -> None:
        """Becomes that life of the rank, after an endpoint was made that ``claims`` nothing."""
        self._check_open()
        if isinstance(self._claim, Claim):
            raise EepError(f"this process is incarnation {self.incarnation} of rank {self.rank} already")
        self._claim = self._rendezvous.claim(self.rank, incarnation)
        self._peers.claimed(self._claim)

    @property
    def rank(self) -> int:
        return self._claim.rank

    @property
    def incarnation(self) -> int:
        return self._claim.incarnation

    @property
    def max_ranks(self) -> int:
        return int(self.shape.max_ranks)

    @property
    def view(self) -> View:
        """The view that the kernels see."""
        return self._peers.view

    @property
    def table(self) -> PeerTable:
        """The peer table itself, at the address that it keeps for the life of the endpoint."""
        return self._peers.table

    @property
    def control_fd(self) -> int:
        """Descriptor of the control page, for the supervisor of this rank."""
        return self._control.fd

    @property
    def refused_requests(self) -> int:
        """How many requests for this rank's memory were dropped because they did not verify."""
        return self._peers.refused_requests

    def connect_ranks(
        self,
        ranks: Iterable[int],
        *,
        epoch: int | None = None,
        incarnations: Mapping[int, int] | None = None,
        timeout: float = 30.0,
    ) -> View:
        """Lets ``ranks`` in, waiting up to ``timeout`` seconds for each to appear; this rank is always among them.

        Every member calls it between the same two steps. ``epoch`` is that of the new view, one more than the last by
        default; ``incarnations`` says which life of a rank is meant, the newest by default.
        """
        self._check_open()
        return self._peers.connect(ranks, epoch, incarnations or {}, timeout)

    def disconnect_ranks(self, ranks: Iterable[int], *, epoch: int | None = None) -> View:
        """Lets ``ranks`` go. Every survivor calls it between the same two steps."""
        self._check_open()
        return self._peers.disconnect(ranks, epoch)

    def apply_view(self, view: View, *, timeout: float = 30.0) -> View:
        """Applies a view that was committed elsewhere. Raises :class:`eep.RankRemoved` if this rank is not in it."""
        self._check_open()
        return self._peers.apply(view, timeout)

    def prepare(self) -> None:
        """Maps the memory of all ranks that are there, before a view lets this rank in: then they wait for it less."""
        self._check_open()
        self._peers.prepare_those_there()

    def prepare_ranks(
        self, ranks: Iterable[int], *, timeout: float, remote_lives: Mapping[int, int] | None = None
    ) -> Mapping[int, Offer | LinkedPeer]:
        """Maps the newest incarnation of each of ``ranks``, and keeps them for the next :meth:`apply_view`. ``remote_lives``
        says which life is meant of those on other hosts: they get links."""
        self._check_open()
        return self._peers.prepare(ranks, timeout, remote_lives or {})

    def forget_prepared(self) -> None:
        """Lets go of what was mapped ahead: no view will have it."""
        self._peers.forget_prepared()

    def start_alone(self) -> View:
        """A view of this rank only, for what it does before it joins: everything works as it will with the others."""
        self._check_open()
        return self._peers.alone()

    def join(self, *, timeout: float = 30.0) -> View:
        """Waits until the members of an instance have connected this rank, and takes over their view."""
        self._check_open()
        return self._peers.adopt(timeout)

    # ---- what ranks say of each other ----

    def announce(self, state: OwnerState) -> None:
        """Says what this rank is up to, to every peer that maps its control page or has a link to it."""
        self.context.announce(state)
        if self._remote is not None:
            self._remote.announce(state)

    def state_of(self, rank: int) -> OwnerState:
        """What the newest incarnation of ``rank`` says of itself. Raises :class:`eep.PeerUnreachable` without an answer."""
        return self._peers.state_of(rank)

    def view_of(self, rank: int) -> View:
        """The view that the newest incarnation of ``rank`` is in. Raises :class:`eep.PeerUnreachable` without an answer."""
        self._check_open()
        return self._peers.view_of(rank)

    def has_left(self, rank: int) -> bool:
        """Whether that peer closed on purpose. What it owed was written before it said so."""
        return self._peers.says(rank, OwnerState.LEFT)

    def is_waiting(self, rank: int) -> bool:
        """Whether that peer, which is in the view, has still to find that out."""
        return self._peers.says(rank, OwnerState.WAITING)

    def has_closed(self, rank: int, group: int) -> bool:
        """Whether that peer says of a process group, by the word for it (``closed_group``), that it was closed."""
        return self._peers.has_closed(rank, group)

    def dead_peers(self) -> tuple[int, ...]:
        """The peers in the view whose process, or link, has ended although they did not leave."""
        processes = {process: rank for (rank, _), process in self.peer_processes.items()}
        ended = select.poll()
        for process in processes:
            ended.register(process, select.POLLIN)
        return tuple(sorted(rank for process, _ in ended.poll(0) if not self.has_left(rank := processes[process])))

    def gone_peers(self) -> tuple[int, ...]:
        """The peers in the view that take part in nothing any more: their process, or link, has ended, or they left."""
        left = (rank for rank in self.view.active if self.has_left(rank))
        return tuple(sorted({*self.dead_peers(), *left}))

    def suspect(self, rank: int) -> None:
        """Ends this rank's waits for ``rank`` in this epoch."""
        self.context.suspect(1 << rank)

    @property
    def peer_processes(self) -> dict[tuple[int, int], int]:
        """For every peer in the view, by rank and incarnation, a descriptor that is readable when it has ended: its pidfd, or
        that of its link."""
        return self._peers.processes

    # ---- the step ----

    @property
    def timeout_ms(self) -> float:
        """How long a kernel waits for a source before it drops it. May be changed between steps."""
        return float(self.table.deadline_ns) / 1e6

    @timeout_ms.setter
    def timeout_ms(self, value: float) -> None:
        if not 0 < value < 1e9:
            raise ValueError(f"timeout_ms must be positive, got {value}")
        self._peers.set_deadline(int(value * 1e6))

    def revoke(self, epoch: int | None = None) -> None:
        """Ends an epoch, by default the current one, here and at every peer. All waits end, and no step in it counts."""
        self._check_open()
        self._peers.revoke(self.view.epoch if epoch is None else epoch)

    def end_waits(self) -> None:
        """Ends the current epoch for this rank alone."""
        self.context.end_waits(self.view.epoch)

    def stream(self) -> int | None:
        """Where native calls are launched: the current CUDA stream, or None on a CPU."""
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None

    def status(self) -> Status:
        """Whether all steps since the last view can be trusted, and if not, why."""
        self._check_open()
        return read_status(self.context.page, self.view.epoch)

    @property
    def is_ok(self) -> bool:
        """Whether all steps since the last view can be trusted: :meth:`status` in one word."""
        self._check_open()
        return self._quick_look.is_ok(self._peers.view.epoch)

    def barrier(self, timeout: float = 30.0) -> None:
        """Waits for every active rank. Raises :class:`eep.StepFailed` if one does not come."""
        self._check_open()
        self.context.barrier(int(timeout * 1e9), self.stream())
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.status().raise_if_bad()

    # ---- the end ----

    @property
    def is_open(self) -> bool:
        return self._undo is not None

    def close(self) -> None:
        """Gives up the rank and its memory. Peers that still map it are not disturbed."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish_kernels(self) -> None:
        """Waits for what was launched: it writes what peers may still wait for, and reads their memory, which the driver
        unmaps under a kernel that runs. Under MPS such a fault would end every process on that GPU."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a GPU that is lost has no kernels to wait for
                torch.cuda.synchronize(self.device)

    def _check_open(self) -> None:
        if self._undo is None:
            raise EepError(f"this {type(self).__name__.lower()} was closed; make a new one")


def _host_id(address: str, rendezvous: pathlib.Path) -> int:
    """The same for ranks that meet in one directory of one host, and never 0."""
    place = rendezvous.stat()
    name = f"{address} {place.st_dev} {place.st_ino}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") | 1
