"""Endpoint: one rank's place in an instance. Its claim, its memory, and the peer table over them.

What the ranks exchange through that memory is the business of those who stand on it: :class:`eep.Buffer` for dispatch and
combine, :mod:`eep.process_group` for collectives. Views are applied between steps, on every rank the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Mapping
from typing import Self

import torch

from eep.abi import native
from eep.abi.collectives import OwnerState
from eep.abi.peer_table import PeerTable
from eep.data_plane.memory import memory_of
from eep.data_plane.memory.exchange import CONTROL_BYTES
from eep.data_plane.memory.shm import SharedMemory
from eep.data_plane.peers import Peers
from eep.data_plane.rendezvous import Rendezvous
from eep.data_plane.status import QuickLook, Status, read_status, words_of
from eep.errors import EepError
from eep.view import View


class Endpoint:
    """One rank of an instance. See :meth:`connect_ranks` for how ranks find each other."""

    def __init__(
        self,
        rank: int,
        shape: native.Shape,
        *,
        rendezvous: Rendezvous | str | os.PathLike[str],
        device: str | torch.device = "cpu",
        incarnation: int | None = None,
        timeout_ms: float = 1000,
    ) -> None:
        """Claims ``rank`` and allocates what ``shape`` asks for.

        ``incarnation`` is given by a control plane; without one, the next unused number is taken.
        """
        self.device = torch.device(device)
        self._library = native.load(self.device.type)
        at = native.RegionLayout()
        self._call(self._library.eep_region_layout_compute(shape, at))
        self.shape, self.layout_of_region = shape, at
        if not 0 <= rank < shape.max_ranks:
            raise ValueError(f"rank {rank} is outside the capacity of {shape.max_ranks} ranks")
        if not isinstance(rendezvous, Rendezvous):
            rendezvous = Rendezvous(rendezvous)

        with contextlib.ExitStack() as undo:
            self._claim = rendezvous.claim(rank, incarnation)
            undo.callback(self._claim.close)
            self._region = memory_of(self.device.type).create(f"eep-region-{rank}", at.total_bytes)
            undo.callback(self._region.close)
            self._control = SharedMemory.create(f"eep-control-{rank}", CONTROL_BYTES)
            undo.callback(self._control.close)
            self._context = ctypes.c_void_p()
            self._call(
                self._library.eep_create(shape, rank, self._region.address, self._control.address, self._context)
            )
            undo.callback(self._library.eep_destroy, self._context)
            self._peers = Peers(
                self._library, self._context, rendezvous, self._claim, shape, self._region, self._control
            )
            undo.callback(self._peers.close)
            self.status_words = words_of(self._peers.page)
            """For a :class:`eep.data_plane.status.QuickLook` at several endpoints."""
            undo.callback(self.status_words.release)
            self._quick_look = QuickLook(self.status_words)
            # Before anything is let go of: whoever waits for us need not wait for what will never come.
            undo.callback(self._say, OwnerState.LEFT)
            self.timeout_ms = timeout_ms
            self._undo: contextlib.ExitStack | None = undo.pop_all()

    # ---- who is in ----

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
        """Maps the memory of all who are there, ahead of the view that lets this rank in: then they wait for it less."""
        self._check_open()
        self._peers.prepare_those_there()

    def start_alone(self) -> View:
        """A view of this rank only, for what it does before it joins: everything works as it will with the others."""
        self._check_open()
        return self._peers.alone()

    def join(self, *, timeout: float = 30.0) -> View:
        """Waits until the members of an instance have connected this rank, and takes over their view."""
        self._check_open()
        return self._peers.adopt(timeout)

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

    def revoke(self) -> None:
        """Ends the current epoch for everybody: all who wait leave at once, and their step is not to be trusted."""
        self._check_open()
        self._peers.revoke(self.view.epoch)

    def status(self) -> Status:
        """Whether all steps since the last view can be trusted, and if not, why."""
        self._check_open()
        return read_status(self._peers.page, self.view.epoch)

    @property
    def is_ok(self) -> bool:
        """Whether all steps since the last view can be trusted: :meth:`status` in one word."""
        self._check_open()
        return self._quick_look.is_ok(self._peers.view.epoch)

    def barrier(self, timeout: float = 30.0) -> None:
        """Waits for every active rank. Raises :class:`eep.StepFailed` if one does not come."""
        self._check_open()
        self._call(self._library.eep_barrier(self._context, int(timeout * 1e9), self._stream()))
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

    def _say(self, state: OwnerState) -> None:
        self._library.eep_control_state(self._peers.page, state)

    def _stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None

    def _call(self, code: int) -> None:
        native.check(self._library, code)

    def _check_open(self) -> None:
        if self._undo is None:
            raise EepError(f"this {type(self).__name__.lower()} was closed")
