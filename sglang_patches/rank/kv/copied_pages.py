"""Pages of a copy of contexts: what they have of a cache, and how they are read back into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from eep.data_plane.memory.row_copy import copy_rows
from eep.requests.kv.copy_layout import PageLayout

COPY = "kv-copy"


def layout_of(layers: Sequence[torch.Tensor]) -> PageLayout:
    return PageLayout(tuple(layer[:1].nbytes for layer in layers))


def kind_of(layers: Sequence[torch.Tensor]) -> str:
    """Caches of the same kind have the same in a page."""
    return repr([(tuple(layer.shape[1:]), str(layer.dtype)) for layer in layers])


class PageBuffers:
    """Where pages lie on their way back into a cache. For one on a GPU there are two buffers, one of which is filled while
    the other is brought there."""

    def __init__(self, device: torch.device, page_bytes: int, most: int) -> None:
        self.most = most
        self._on_gpu, shape = device.type == "cuda", (most, page_bytes)
        count, make = (2, _pinned) if self._on_gpu else (1, _plain)
        self._filled = [make(most * page_bytes).view(shape) for _ in range(count)]
        self._brought = (
            [torch.empty_like(each, device=device) for each in self._filled] if self._on_gpu else self._filled
        )
        self._over = [torch.cuda.Event() for _ in self._filled] if self._on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def bring(self, count: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        """So many pages, ``most`` at most, as ``fill`` leaves them, where the cache is. They stand until the call after the
        next, or on a CPU until the next."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._filled)
        filled, brought = self._filled[turn][:count], self._brought[turn][:count]
        if self._on_gpu:
            self._over[turn].synchronize()
        fill(filled.numpy())
        if self._on_gpu:
            brought.copy_(filled, non_blocking=True)
            self._over[turn].record()
        return brought.view(-1)


def unload(content: torch.Tensor, layers: Sequence[torch.Tensor], slots: torch.Tensor, first: int) -> None:
    """``layers`` get at ``slots`` what the pages in ``content`` have from their token ``first`` on."""
    layout = layout_of(layers)
    pages = np.arange(len(content) // layout.page_bytes)
    for size, inside, outside in _matched(layout, content, layers):
        rows = layout.rows(size, pages)[first : first + len(slots)]
        copy_rows(outside, inside, slots, torch.from_numpy(rows).to(slots.device))


def _matched(
    layout: PageLayout, content: torch.Tensor, layers: Sequence[torch.Tensor]
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    """Of the layers whose rows have the same size: that size, their rows in pages, and the layers themselves, as bytes."""
    for size, some in layout.layers_by_size().items():
        rests = [content[layout.start(layer) :] for layer in some]
        inside = [rest[: len(rest) // size * size].view(-1, size) for rest in rests]
        yield size, inside, [_as_bytes(layers[layer]) for layer in some]


def _as_bytes(layer: torch.Tensor) -> torch.Tensor:
    return layer.view(len(layer), -1).view(torch.uint8)


def _plain(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
