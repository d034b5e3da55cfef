"""The dispatches behind DeepEP's interface, on the two channels of a buffer.

A channel goes from a dispatch to its combine and back. DeepEP asks for more: a dispatch need not be combined, and a handle
may be combined again. So a dispatch that stands in the way is ended with a combine of nothing, and a second combine is that
of a dispatch of blank tokens along the same routes. All ranks make the same calls in the same order, and nothing is decided
by anything else, so each of them does this at the same call.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from eep.compat.sizes import CHANNELS, WIRE
from eep.data_plane.token_buffer import SplitTokenBuffer
from eep.data_plane.tokens import ExpertTokens
from eep.errors import EepError


class Stage(enum.Enum):
    """How far a dispatch has come."""

    SENT = enum.auto()
    RECEIVED = enum.auto()
    COMBINING = enum.auto()
    COMBINED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One dispatch and what comes after it."""

    inner: SplitTokenBuffer
    tokens: ExpertTokens
    stage: Stage = Stage.SENT

    def receive(self) -> None:
        self.inner.dispatch_recv(self.tokens.sent)
        self.stage = Stage.RECEIVED

    def send_back(self, x: torch.Tensor) -> None:
        """Sends the outputs of the experts to the ranks of their tokens; again, if that was done before."""
        if self.stage is Stage.COMBINING:
            raise EepError("the last combine of this handle has not received; call its hook before you combine again")
        if self.stage is Stage.COMBINED:
            self._send_back_again(x)
        else:
            self.inner.combine_send(x, self.tokens)
        self.stage = Stage.COMBINING

    def add_up(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor) -> None:
        """Adds up what came back."""
        sent = dataclasses.replace(self.tokens.sent, topk_idx=topk_idx, topk_weights=topk_weights)
        self.inner.combine_recv(sent, out=out)
        self.stage = Stage.COMBINED

    def finish(self) -> None:
        """Makes the channel free. The dispatch may still be combined, until another one takes the channel."""
        if self.stage is Stage.COMBINING:
            raise EepError("a combine has not received; call its hook before the second dispatch after it")
        if self.stage is Stage.SENT:
            self.receive()
        if self.stage is Stage.RECEIVED:
            tokens, sent = self.tokens, self.tokens.sent
            count, device = len(sent.topk_idx), self.inner.device
            nothing = dataclasses.replace(tokens, layout_range=torch.zeros_like(tokens.layout_range))
            self.inner.combine_send(self.inner.combine_input(sent.channel), nothing)
            self.stage = Stage.COMBINING
            none = torch.full((count, 1), -1, dtype=torch.int64, device=device)
            self.add_up(none, None, torch.empty(count, self.inner.hidden, dtype=torch.bfloat16, device=device))

    def _send_back_again(self, x: torch.Tensor) -> None:
        """What the dispatch received stays as it was."""
        received, sent = self.tokens, self.tokens.sent
        tensors = (received.x, received.expert_counts, received.src_info, received.layout_range, received.rank_counts)
        kept = [tensor.clone() for tensor in tensors]
        ranges_then = kept[3]
        blank = torch.zeros(len(sent.topk_idx), self.inner.hidden, dtype=torch.bfloat16, device=self.inner.device)
        self.inner.dispatch_recv(self.inner.dispatch_send(blank, sent.topk_idx, channel=sent.channel, wire=WIRE))
        self.inner.combine_send(moved_rows(x, ranges_then, received.layout_range), received)
        for tensor, copy in zip(tensors, kept, strict=True):
            tensor.copy_(copy)


def moved_rows(x: torch.Tensor, then: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The rows of ``x``, which lay as the ranges of ``then`` say, as those of ``now`` say: a source that was dropped since
    left a gap. Reads no values, so that a GPU need not be waited for."""
    experts, rows, _ = x.shape
    begin, end = now >> 32, (now >> 32) + (now & 0xFFFFFFFF)
    row = torch.arange(rows, device=x.device).expand(experts, rows).contiguous()
    source = torch.searchsorted(end, row, right=True).clamp_(max=now.shape[1] - 1)
    row_then = (then >> 32).gather(1, source) + row - begin.gather(1, source)
    return x.gather(1, row_then.clamp_(0, rows - 1).unsqueeze(-1).expand_as(x))


class Flights:
    """The last dispatch of each channel."""

    def __init__(self) -> None:
        self._by_channel: dict[int, Flight] = {}
        self._turn = 0

    def clear(self) -> None:
        """A new view or new memory begins: all ranks start from the same channel again, joiners too."""
        self._by_channel.clear()
        self._turn = 0

    def free_channel(self) -> int:
        """The channel of the next dispatch: they take turns, but a dispatch that was not combined keeps its channel while
        the other one is free."""
        channel = self._turn
        if self._waits(channel) and not self._waits(other := CHANNELS - 1 - channel):
            channel = other
        if (flight := self._by_channel.get(channel)) is not None:
            flight.finish()
        return channel

    def add(self, inner: SplitTokenBuffer, tokens: ExpertTokens) -> Flight:
        """A dispatch that was sent on its channel."""
        # The memory belongs to the channel, the tensor object to this dispatch alone: combine knows its handle by it.
        own = dataclasses.replace(tokens, src_info=tokens.src_info.view_as(tokens.src_info))
        channel = tokens.sent.channel
        flight = self._by_channel[channel] = Flight(inner, own)
        self._turn = CHANNELS - 1 - channel
        return flight

    def find(self, src_info: torch.Tensor) -> Flight:
        """The dispatch that ``src_info`` stands for."""
        for flight in self._by_channel.values():
            if flight.tokens.src_info is src_info:
                return flight
        raise EepError(
            "no dispatch belongs to this handle or hook any more: a later dispatch took its place, a rank came or went, or "
            "the sizes changed; dispatch again"
        )

    def check(self, flight: Flight) -> None:
        """Raises unless ``flight`` is still there."""
        self.find(flight.tokens.src_info)

    def _waits(self, channel: int) -> bool:
        flight = self._by_channel.get(channel)
        return flight is not None and flight.stage in (Stage.SENT, Stage.RECEIVED)
