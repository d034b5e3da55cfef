"""What the code around a model asks of the buffer through which its tokens travel.

:class:`eep.Buffer` is such a buffer. A caller needs no more of it than one of these protocols: membership, memory and the
status of a step are for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from eep.data_plane.tokens import ExpertTokens, RankTokens, Sent


class TokenBuffer(Protocol):
    """Exchanges tokens in two calls, as a dispatcher of MoE layers makes them."""

    combine_dtype: torch.dtype
    """The type in which the outputs of experts travel back."""

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> RankTokens | ExpertTokens:
        """Sends each token to the ranks of its experts and receives what the others sent here."""
        ...

    def combine_input(self) -> torch.Tensor:
        """Where experts may write their output for :meth:`combine`, after a dispatch."""
        ...

    def combine(
        self, x: torch.Tensor, tokens: RankTokens | ExpertTokens, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gives back to each token the sum over its experts, in ``out`` if there is one."""
        ...


class SplitTokenBuffer(Protocol):
    """Exchanges tokens in halves, so that compute goes between them, on channels that do not disturb each other."""

    hidden: int
    device: torch.device

    def dispatch_send(self, x: torch.Tensor, topk_idx: torch.Tensor, *, channel: int, wire: str) -> Sent:
        """Sends each token to the ranks of its experts."""
        ...

    def tokens_of(self, sent: Sent) -> RankTokens | ExpertTokens:
        """Where what the others dispatched will lie."""
        ...

    def dispatch_recv(self, sent: Sent) -> RankTokens | ExpertTokens:
        """Receives what the others dispatched."""
        ...

    def combine_input(self, channel: int) -> torch.Tensor:
        """Where experts may write their output for :meth:`combine_send`, after a dispatch."""
        ...

    def combine_send(self, x: torch.Tensor, tokens: RankTokens | ExpertTokens) -> None:
        """Sends the outputs of experts back to the ranks of their tokens."""
        ...

    def combine_recv(self, sent: Sent, *, out: torch.Tensor) -> torch.Tensor:
        """Gives back to each token the sum over its experts."""
        ...
