"""Pages of a copy of contexts, filled from a cache and read back into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from eep.data_plane.memory.row_copy import RowCopy, copy_rows
from eep.requests.kv.copy_layout import PAGE, PageLayout

COPY = "kv-copy"


def layout_of(layers: Sequence[torch.Tensor]) -> PageLayout:
    return PageLayout(tuple(layer[:1].nbytes for layer in layers))


def kind_of(layers: Sequence[torch.Tensor]) -> str:
    """Caches of the same kind have the same in a page."""
    return repr([(tuple(layer.shape[1:]), str(layer.dtype)) for layer in layers])


class PageFill:
    """Copies entries of ``layers`` to pages, which lie one after the other in ``content``."""

    def __init__(self, content: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        self._layout = layout_of(layers)
        self._copies = {
            size: RowCopy(inside, outside) for size, inside, outside in _matched(self._layout, content, layers)
        }

    def __call__(self, pages: npt.NDArray[np.int64], slots: torch.Tensor) -> None:
        """These pages get what the layers have at ``slots``, 16 for each page."""
        for size, copy in self._copies.items():
            copy(torch.from_numpy(self._layout.rows(size, pages)).to(slots.device), slots)


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


class CpuGather:
    """Copies entries of a cache in host memory to pages, in place."""

    def __init__(self, table: torch.Tensor, layers: Sequence[torch.Tensor], content: torch.Tensor) -> None:
        self._table = table.view(-1).numpy()
        self._fill = PageFill(content, layers)

    def copy(self, places: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """The entries that the table has at ``places``, 16 for each of ``pages``. Of each page: whether the table has not
        changed meanwhile. It does when SGLang finds that another request has computed the same prefix."""
        slots = self._table[places]
        self._fill(pages, torch.from_numpy(slots.astype(np.int64).ravel()))
        same: npt.NDArray[np.bool_] = (self._table[places] == slots).all(axis=1)
        return same


class GpuGather:
    """Copies entries of a cache on a GPU to pages: gathered there, brought to the host in one piece, and put into place.

    It has a stream of its own, of the lowest priority, and waits for nothing but that. Memory and kernels that it needs are
    there from the beginning: to get them later would wait for kernels that may wait for a peer.
    """

    def __init__(
        self, table: torch.Tensor, layers: Sequence[torch.Tensor], content: torch.Tensor, page_bytes: int, most: int
    ) -> None:
        device, tokens = table.device, most * PAGE
        self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        gathered = torch.empty(most * page_bytes, dtype=torch.uint8, device=device)
        self._gathered, self._brought = gathered, _pinned(len(gathered))
        self._fill = PageFill(gathered, layers)
        self._put = RowCopy([content.view(-1, page_bytes)], [self._brought.view(-1, page_bytes)])
        self._page_bytes = page_bytes
        self._slots = torch.empty(tokens, 1, dtype=table.dtype, device=device)
        self._look_up = RowCopy([self._slots], [table.view(-1, 1)])
        self._upto = torch.arange(tokens).to(device)  # waits for what was launched before: the table is zeroed
        self.copy(np.zeros((most, PAGE), np.int64), np.zeros(most, np.int64))

    def copy(self, places: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """As :meth:`CpuGather.copy`."""
        count = len(pages)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            where = torch.from_numpy(places.ravel()).to(self._upto.device)
            slots = self._slots_at(where)
            self._fill(np.arange(count), slots.long().to(where.device))
            size = count * self._page_bytes
            self._brought[:size].copy_(self._gathered[:size], non_blocking=True)
            again = self._slots_at(where)  # waits for what was brought, too
        self._put(torch.from_numpy(pages), torch.arange(count))
        return (again == slots).view(places.shape).all(dim=1).numpy()

    def _slots_at(self, where: torch.Tensor) -> torch.Tensor:
        self._look_up(self._upto[: len(where)], where)
        found = self._slots[: len(where), 0].to("cpu", copy=True)
        self._stream.synchronize()
        return found


def _plain(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
