"""Copies of rows that a table names, from the layers of a cache to pages in host memory.

One call of the native library does all of it. The thread that asks waits without Python's lock, so that a step that runs
beside it hardly notices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eep.abi import native
from eep.abi.structures import PageCopyArgs


class PageCopy:
    """``table`` says which row of all ``layers`` each place has. A page gets the rows of ``page_tokens`` places that follow
    each other, layer by layer, and lies in ``content``, in host memory. At most ``most`` pages are copied at once.

    On a GPU this has a stream of its own, of the lowest priority, and waits for nothing but that. The memory that it needs is
    there from the beginning: to get it later would wait for kernels that may wait for a peer.
    """

    def __init__(
        self,
        table: torch.Tensor,
        layers: Sequence[torch.Tensor],
        content: torch.Tensor,
        *,
        page_bytes: int,
        page_tokens: int,
        most: int,
    ) -> None:
        if not all(each.is_contiguous() for each in (table, content, *layers)):
            raise ValueError("a table, layers and pages that are copied must each be in one piece")
        on_gpu = table.is_cuda
        self._device = table.device
        self._stream = torch.cuda.Stream(table.device, priority=0) if on_gpu else None  # type: ignore[no-untyped-call]
        self._library = native.load(table.device.type)
        self._most = most
        self._places = torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu)
        self._same = torch.zeros(most, dtype=torch.uint8, pin_memory=on_gpu)
        rows = torch.zeros(most * page_tokens, dtype=torch.int32, device=table.device)
        brought = torch.empty(most * page_bytes if on_gpu else 0, dtype=torch.uint8, pin_memory=on_gpu)
        gathered = torch.empty(brought.shape, dtype=torch.uint8, device=table.device)
        self._kept = (table, *layers, content, rows, brought, gathered)
        """They stay where they are for as long as this object is there."""
        self._arguments = PageCopyArgs(
            from_=(ctypes.c_void_p * len(layers))(*(each.data_ptr() for each in layers)),
            row_bytes=(ctypes.c_uint64 * len(layers))(*(each[:1].nbytes for each in layers)),
            table=table.data_ptr(),
            pages=content.data_ptr(),
            page_bytes=page_bytes,
            places=self._places.data_ptr(),
            same=self._same.data_ptr(),
            rows=rows.data_ptr(),
            brought=brought.data_ptr() if on_gpu else None,
            gathered=gathered.data_ptr() if on_gpu else None,
            layers=len(layers),
            page_tokens=page_tokens,
            most=most,
        )
        if on_gpu:
            torch.cuda.synchronize(table.device)  # table and layers are as they were left

    def __call__(self, places: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """What the table has from ``places[i]`` on goes to page ``pages[i]``, ``most`` of them at most. Of each page: whether
        the table has not changed meanwhile. It does when SGLang finds that another request has computed the same prefix.

        The caller has checked that there are such places, rows and pages.
        """
        count = len(pages)
        if len(places) != count or count > self._most:
            raise ValueError(
                f"{len(places)} places cannot go to {count} pages; {self._most} are copied at once, at most"
            )
        self._places.numpy()[:count] = places
        pages = np.ascontiguousarray(pages, np.int64)
        stream = None
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # of this thread
            stream = self._stream.cuda_stream
        native.check(self._library, self._library.eep_copy_pages(self._arguments, count, pages.ctypes.data, stream))
        same: npt.NDArray[np.bool_] = self._same.numpy()[:count] != 0
        return same
