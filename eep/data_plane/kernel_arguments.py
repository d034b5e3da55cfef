"""Tensors in, kernel arguments out: everything is checked here, before a kernel is told of it.

Launches nothing and knows nothing of peers. Bad input raises ``ValueError`` or ``TypeError`` and changes nothing.
"""

from __future__ import annotations

import torch

from eep.abi import native
from eep.abi.native import TYPES
from eep.data_plane.buffer_shape import BufferShape, check_choice
from eep.data_plane.tokens import ChannelTensors, ExpertTokens, RankTokens, Sent

_INPUT_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class KernelArguments:
    """Makes the arguments for the kernels of one buffer."""

    def __init__(self, shape: BufferShape, device: torch.device, channels: list[ChannelTensors]) -> None:
        self._shape = shape
        self._device = device
        self._channels = channels

    def tokens_of(self, sent: Sent) -> RankTokens | ExpertTokens:
        """Where what the others dispatched lies: always the same tensors for a channel."""
        return self._channels[sent.channel].tokens(sent)

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        channel: int,
        wire: str | None,
    ) -> tuple[Sent, native.DispatchSendArgs]:
        wire = wire or self._shape.wire
        check_choice("wire", wire, TYPES)
        self._check_tensor("x", x, (None, self._shape.hidden), tuple(_INPUT_TYPES))
        self._check_tensor("topk_idx", topk_idx, (x.shape[0], None), (torch.int64,))
        if topk_weights is not None:
            self._check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,))
        if not 1 <= topk_idx.shape[1] <= self._shape.topk:
            raise ValueError(f"top-k must be between 1 and {self._shape.topk}, got {topk_idx.shape[1]}")
        if not 0 <= channel < len(self._channels):
            raise ValueError(f"channel {channel} does not exist, the buffer has {len(self._channels)}")
        if self._shape.layout == "rank" and wire != self._shape.wire:
            raise ValueError(
                f"a buffer of the rank layout sends the type it was made for: {self._shape.wire}, not {wire}"
            )
        if not wire.startswith("fp8") and _INPUT_TYPES[x.dtype] != wire:
            raise TypeError(f"x is {x.dtype}, but this dispatch sends {wire}; convert x or choose another wire")
        if wire == "fp8_ue8m0" and self._shape.layout == "expert" and self._shape.hidden % 512:
            raise ValueError(f"exponents go four to a word: hidden must be a multiple of 512, got {self._shape.hidden}")
        args = native.DispatchSendArgs(
            x.data_ptr(),
            topk_idx.data_ptr(),
            None if topk_weights is None else topk_weights.data_ptr(),
            x.shape[0],
            topk_idx.shape[1],
            TYPES[_INPUT_TYPES[x.dtype]],
            TYPES[wire],
            channel,
        )
        return Sent(topk_idx, topk_weights, wire, channel), args

    def dispatch_recv(self, sent: Sent) -> tuple[RankTokens | ExpertTokens, native.DispatchRecvArgs]:
        tokens = self.tokens_of(sent)
        args = native.DispatchRecvArgs(
            count=tokens.rank_counts.data_ptr(),
            topk=sent.topk_idx.shape[1],
            wire_type=TYPES[sent.wire],
            channel=sent.channel,
        )
        if isinstance(tokens, RankTokens):
            args.topk_idx, args.topk_weights = tokens.topk_idx.data_ptr(), tokens.topk_weights.data_ptr()
        else:
            args.packed_rows = tokens.x.data_ptr()
            args.packed_scales = None if tokens.scales is None else tokens.scales.data_ptr()
            args.packed_count, args.src_info = tokens.expert_counts.data_ptr(), tokens.src_info.data_ptr()
            args.layout_range = tokens.layout_range.data_ptr()
        return tokens, args

    def combine_send(self, x: torch.Tensor, tokens: RankTokens | ExpertTokens) -> native.CombineSendArgs:
        self._check_tensor("x", x, tuple(tokens.x.shape), (self._shape.combine_dtype,))
        args = native.CombineSendArgs(x.data_ptr(), topk=tokens.sent.topk_idx.shape[1], channel=tokens.sent.channel)
        if isinstance(tokens, ExpertTokens):
            args.src_info, args.layout_range = tokens.src_info.data_ptr(), tokens.layout_range.data_ptr()
        return args

    def combine_recv(self, sent: Sent, out: torch.Tensor | None) -> tuple[torch.Tensor, native.CombineRecvArgs]:
        tokens, topk = sent.topk_idx.shape
        if out is None:
            out = torch.empty(tokens, self._shape.hidden, dtype=self._shape.combine_dtype, device=self._device)
        self._check_tensor("out", out, (tokens, self._shape.hidden), (self._shape.combine_dtype,))
        weights = None if sent.topk_weights is None else sent.topk_weights.data_ptr()
        args = native.CombineRecvArgs(out.data_ptr(), sent.topk_idx.data_ptr(), weights, tokens, topk, sent.channel)
        return out, args

    def _check_tensor(
        self, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        fits = tensor.dim() == len(shape) and all(
            want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name} must be of shape [{wanted}], got {list(tensor.shape)}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.device.type != self._device.type:
            raise ValueError(f"{name} is on {tensor.device}, this buffer is on {self._device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; call .contiguous() on it")
