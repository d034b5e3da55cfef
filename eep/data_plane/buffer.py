"""Buffer: a rank's memory, its peer table, and dispatch/combine over them.

A step is any number of dispatch/combine pairs. When it is over, :meth:`Buffer.status` tells whether it can be trusted:
if it is ``ok``, every sum that combine gave is exact; if not, nothing of the step may be used, and it is run again after
the next view was applied. Views are applied between steps, on every rank the same.
"""

from __future__ import annotations

import itertools
import os
import weakref

import torch

from eep.data_plane.buffer_shape import BufferShape
from eep.data_plane.endpoint import Endpoint
from eep.data_plane.kernel_arguments import KernelArguments
from eep.data_plane.rendezvous import Rendezvous
from eep.data_plane.tokens import ChannelTensors, ExpertTokens, RankTokens, Sent
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.errors import EepError

_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_ids = itertools.count()


class Buffer(Endpoint):
    """An endpoint through which MoE ranks exchange tokens."""

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
        combine: str | None = None,
        device: str | torch.device = "cpu",
        incarnation: int | None = None,
        channels: int = 1,
        timeout_ms: float = 1000,
        sms: int | None = None,
        shares_gpu: bool = False,
        overlaps: bool = False,
        claims: bool = True,
        hosts: RemoteHosts | None = None,
    ) -> None:
        """Claims ``rank`` and allocates for ``max_ranks`` ranks of ``max_tokens`` tokens each.

        Expert ``e`` is slot ``e % local_experts`` of rank ``e // local_experts``. ``wire`` is what travels: ``f32``,
        ``bf16``, or ``fp8`` (fp32 scales), ``fp8_pow2`` (scales rounded up to powers of two), ``fp8_ue8m0`` (scales sent
        as exponents). With ``combine="fp8"`` what the experts give travels back as ``fp8`` too, half of the bytes of bf16,
        and each output is rounded to three bits behind its first one. A control plane gives ``incarnation``; without one,
        the rank takes the next unused number. For ``claims`` and ``hosts`` see
        :class:`eep.data_plane.endpoint.Endpoint`.

        ``sms`` is how many multiprocessors of a GPU a kernel takes: by default all divided by ``max_ranks``, 32 at most.
        Ranks that share a GPU wait for each other, so their kernels must fit on it together. ``shares_gpu`` says that
        other ranks run on this GPU and have work for it between dispatch and combine. A waiting kernel then takes hardly
        any multiprocessor. Otherwise matrix products that start in clusters might find no room, and every rank would wait
        until the deadline.

        With ``overlaps`` our kernels take their place while the kernel before them ends, and let the one behind them do
        the same if it was launched for that (programmatic dependent launch). As such kernels have to, it must wait until
        ours is over before it reads what ours wrote. Not all do.
        """
        shape = BufferShape(
            max_ranks=max_ranks,
            max_tokens=max_tokens,
            hidden=hidden,
            topk=topk,
            local_experts=local_experts,
            layout=layout,
            wire=wire,
            combine=combine,
            channels=channels,
        )
        if sms is not None and sms < 1:
            raise ValueError(f"sms must be positive, got {sms}")
        self.layout, self.wire, self.max_tokens = layout, wire, max_tokens
        self.hidden, self.topk, self.local_experts, self.channels = hidden, topk, local_experts, channels
        self.combine_dtype = shape.combine_dtype
        super().__init__(
            rank,
            shape.native(),
            rendezvous=rendezvous,
            device=device,
            incarnation=incarnation,
            timeout_ms=timeout_ms,
            claims=claims,
            hosts=hosts,
        )
        if sms is not None:
            self.context.tune(sms)
        self.shares_gpu = shares_gpu
        if shares_gpu:
            self.context.share_gpu()
        if overlaps:
            self.context.overlap()
        self._tensors = [
            ChannelTensors(self.shape, self.layout_of_region, self.region, channel, self.device)
            for channel in range(channels)
        ]
        self._arguments = KernelArguments(shape, self.device, self._tensors)
        self.id = next(_ids)
        _buffers[self.id] = self

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
        self.context.dispatch(send, receive, self.stream())
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
        self.context.combine(send, receive, self.stream())
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
        self.context.dispatch_send(send, self.stream())
        return sent

    def dispatch_recv(self, sent: Sent) -> RankTokens | ExpertTokens:
        """The second half of :meth:`dispatch`."""
        self._check_open()
        tokens, receive = self._arguments.dispatch_recv(sent)
        self.context.dispatch_recv(receive, self.stream())
        return tokens

    def tokens_of(self, sent: Sent) -> RankTokens | ExpertTokens:
        """Where what the others dispatched lies: always the same tensors for a channel."""
        self._check_open()
        return self._arguments.tokens_of(sent)

    def combine_input(self, channel: int = 0) -> torch.Tensor:
        """Where experts may write their output for :meth:`combine`, after a dispatch; in the ``rank`` layout this is the
        memory that the peers read, unless outputs travel encoded."""
        self._check_open()
        return self._tensors[channel].outputs

    def combine_send(self, x: torch.Tensor, tokens: RankTokens | ExpertTokens) -> None:
        """The first half of :meth:`combine`."""
        self._check_open()
        send = self._arguments.combine_send(x, tokens)
        self.context.combine_send(send, self.stream())

    def combine_recv(self, sent: Sent, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The second half of :meth:`combine`."""
        self._check_open()
        out, receive = self._arguments.combine_recv(sent, out)
        self.context.combine_recv(receive, self.stream())
        return out

    def close(self) -> None:
        """Gives up the rank and its memory. Peers that still map it are not disturbed."""
        if self.is_open:
            _buffers.pop(self.id, None)
            self._tensors.clear()
        super().close()


def find_buffer(buffer_id: int) -> Buffer:
    """The open buffer of this process with that id."""
    if (buffer := _buffers.get(buffer_id)) is None:
        raise EepError(
            f"this process has no open buffer with id {buffer_id}; it was closed, or belongs to another process"
        )
    return buffer
