"""Buffer: a rank's memory, its peer table, and dispatch/combine over them.

A step is any number of dispatch/combine pairs. When it is over, :meth:`Buffer.status` tells whether it can be trusted:
if it is ``ok``, every sum that combine gave is exact; if not, nothing of the step may be used, and it is run again after
the next view was applied. Views are applied between steps, on every rank the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import weakref
from collections.abc import Iterable, Mapping

import torch

from eep import native
from eep.arguments import Arguments, choose
from eep.errors import EepError
from eep.memory import memory_of
from eep.memory.exchange import CONTROL_BYTES
from eep.memory.shm import SharedMemory
from eep.native import LAYOUTS, TYPES
from eep.peer_table import PeerTable
from eep.peers import Peers
from eep.received import ROW_DTYPES, ChannelTensors, ExpertTokens, RankTokens, Sent
from eep.rendezvous import Rendezvous
from eep.status import Status, read_status
from eep.view import View

_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_ids = itertools.count()


class Buffer:
    """One rank of an instance. See :meth:`connect_ranks` for how ranks find each other."""

    def __init__(
        self,
        rank: int,
        *,
        rendezvous: Rendezvous | str | os.PathLike[str],
        max_ranks: int,
        max_tokens: int,
        hidden: int,
        topk: int,
        local_experts: int,
        layout: str = "rank",
        wire: str = "bf16",
        device: str | torch.device = "cpu",
        incarnation: int | None = None,
        channels: int = 1,
        timeout_ms: float = 1000,
        sms: int | None = None,
    ) -> None:
        """Claims ``rank`` and allocates for ``max_ranks`` ranks of ``max_tokens`` tokens each.

        Expert ``e`` is slot ``e % local_experts`` of rank ``e // local_experts``. ``wire`` is what travels: ``f32``,
        ``bf16``, or ``fp8`` (fp32 scales), ``fp8_pow2`` (scales rounded up to powers of two), ``fp8_ue8m0`` (sent as
        exponents). ``incarnation`` is given by a control plane; without one, the next unused number is taken. ``sms`` is
        how many multiprocessors a kernel takes of a GPU, by default all divided by ``max_ranks``, 32 at most: the kernels
        of ranks that share one wait for each other, so together they must fit on it.
        """
        choose("layout", layout, LAYOUTS)
        choose("wire", wire, TYPES)
        self.device = torch.device(device)
        self._library = native.load(self.device.type)
        self.layout, self.wire, self.max_ranks, self.max_tokens = layout, wire, max_ranks, max_tokens
        self.hidden, self.topk, self.local_experts, self.channels = hidden, topk, local_experts, channels
        combine_type = "f32" if wire == "f32" else "bf16"
        self.combine_dtype = ROW_DTYPES[combine_type]
        sizes = (max_ranks, max_tokens, hidden, topk, local_experts)
        for name, size in zip(("max_ranks", "max_tokens", "hidden", "topk", "local_experts"), sizes, strict=True):
            if not 0 < size < 2**31:
                raise ValueError(f"{name} must be positive, got {size}")
        shape = native.Shape(*sizes, LAYOUTS[layout], TYPES[wire], TYPES[combine_type], channels)
        at = native.RegionLayout()
        native.check(self._library, self._library.eep_region_layout_compute(shape, at))
        if not 0 <= rank < max_ranks:
            raise ValueError(f"rank {rank} is outside the capacity of {max_ranks} ranks")
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
            if sms is not None:
                if sms < 1:
                    raise ValueError(f"sms must be positive, got {sms}")
                self._call(self._library.eep_tune(self._context, sms, 0))
            self._peers = Peers(
                self._library, self._context, rendezvous, self._claim, shape, self._region, self._control
            )
            undo.callback(self._peers.close)
            self._tensors = [
                ChannelTensors(shape, at, self._region, channel, self.device) for channel in range(channels)
            ]
            undo.callback(self._tensors.clear)
            self._arguments = Arguments(
                layout=layout,
                wire=wire,
                hidden=hidden,
                topk=topk,
                combine_dtype=self.combine_dtype,
                device=self.device,
                channels=self._tensors,
            )
            self.timeout_ms = timeout_ms
            self.id = next(_ids)
            _buffers[self.id] = self
            self._undo: contextlib.ExitStack | None = undo.pop_all()

    # ---- who is in ----

    @property
    def rank(self) -> int:
        return self._claim.rank

    @property
    def incarnation(self) -> int:
        return self._claim.incarnation

    @property
    def view(self) -> View:
        """The view that the kernels see."""
        return self._peers.view

    @property
    def table(self) -> PeerTable:
        """The peer table itself, at the address that it keeps for the life of the buffer."""
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

    def barrier(self, timeout: float = 30.0) -> None:
        """Waits for every active rank. Raises :class:`eep.StepFailed` if one does not come."""
        self._check_open()
        self._call(self._library.eep_barrier(self._context, int(timeout * 1e9), self._stream()))
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.status().raise_if_bad()

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        channel: int = 0,
        wire: str | None = None,
    ) -> RankTokens | ExpertTokens:
        """Sends each token to the ranks of its experts and receives what the others sent here.

        ``x`` is ``[tokens, hidden]`` f32 or bf16, ``topk_idx`` int64 ``[tokens, k]`` with -1 for "none". Never raises
        because of a peer: ask :meth:`status`.
        """
        self._check_open()
        sent, send = self._arguments.dispatch_send(x, topk_idx, topk_weights, channel, wire)
        tokens, receive = self._arguments.dispatch_recv(sent)
        self._call(self._library.eep_dispatch(self._context, send, receive, self._stream()))
        return tokens

    def combine(
        self, x: torch.Tensor, tokens: RankTokens | ExpertTokens, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gives back to each token the sum over its experts, added in a fixed order.

        ``x`` has one row per row received: in the ``rank`` layout already weighted and summed over the local experts of
        the token, in the ``expert`` layout as the expert left it. Writing into :meth:`combine_input` saves a copy.
        """
        self._check_open()
        send = self._arguments.combine_send(x, tokens)
        out, receive = self._arguments.combine_recv(tokens.sent, out)
        self._call(self._library.eep_combine(self._context, send, receive, self._stream()))
        return out

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        channel: int = 0,
        wire: str | None = None,
    ) -> Sent:
        """The first half of :meth:`dispatch`; compute may go between the two."""
        self._check_open()
        sent, send = self._arguments.dispatch_send(x, topk_idx, topk_weights, channel, wire)
        self._call(self._library.eep_dispatch_send(self._context, send, self._stream()))
        return sent

    def dispatch_recv(self, sent: Sent) -> RankTokens | ExpertTokens:
        """The second half of :meth:`dispatch`."""
        self._check_open()
        tokens, receive = self._arguments.dispatch_recv(sent)
        self._call(self._library.eep_dispatch_recv(self._context, receive, self._stream()))
        return tokens

    def tokens_of(self, sent: Sent) -> RankTokens | ExpertTokens:
        """Where what the others dispatched lies: always the same tensors for a channel."""
        self._check_open()
        return self._arguments.tokens_of(sent)

    def combine_input(self, channel: int = 0) -> torch.Tensor:
        """Where experts may write their output for :meth:`combine`, after a dispatch; in the ``rank`` layout this is the
        memory that the peers read."""
        self._check_open()
        return self._tensors[channel].outbox

    def combine_send(self, x: torch.Tensor, tokens: RankTokens | ExpertTokens) -> None:
        """The first half of :meth:`combine`."""
        self._check_open()
        send = self._arguments.combine_send(x, tokens)
        self._call(self._library.eep_combine_send(self._context, send, self._stream()))

    def combine_recv(self, sent: Sent, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The second half of :meth:`combine`."""
        self._check_open()
        out, receive = self._arguments.combine_recv(sent, out)
        self._call(self._library.eep_combine_recv(self._context, receive, self._stream()))
        return out

    # ---- the end ----

    def close(self) -> None:
        """Gives up the rank and its memory. Peers that still map it are not disturbed."""
        if self._undo is not None:
            _buffers.pop(self.id, None)
            self._undo.close()
            self._undo = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None

    def _call(self, code: int) -> None:
        native.check(self._library, code)

    def _check_open(self) -> None:
        if self._undo is None:
            raise EepError("this buffer was closed")


def find_buffer(buffer_id: int) -> Buffer:
    """The open buffer of this process with that id."""
    if (buffer := _buffers.get(buffer_id)) is None:
        raise EepError(f"there is no open buffer with id {buffer_id} in this process")
    return buffer
