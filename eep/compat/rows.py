"""Rows between ranks, as many as each has for each other: what DeepEP's normal mode moves tokens with.

The rows go through a lane, as the collectives of a process group do, in memory that is made at the first use. A rank that
does not answer ends the call with :class:`eep.StepFailed`; nothing of it may be used then.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence

import torch

from eep.abi import native
from eep.compat.presence import Presence
from eep.data_plane.endpoint import Endpoint
from eep.process_group import calls
from eep.process_group.call import Call
from eep.process_group.gate import Gate
from eep.process_group.lane import DeviceLane, Lane, group_id

_PIECE_BYTES = 1 << 20
# A GPU's memory is not given lazily: blocks x two halves x bytes.
_GPU_BLOCKS = 8
_GPU_PIECE_BYTES = 1 << 20


class RowExchange:
    """One rank's part. ``ranks``: how many there are, of which ``members`` take part."""

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        ranks: int,
        *,
        directory: pathlib.Path,
        device: torch.device,
        timeout_ms: float,
        patience_s: float,
        presence: Presence,
    ) -> None:
        """Meets the other members, which may be late by ``patience_s``."""
        on_cpu = device.type == "cpu"
        shape = native.Shape(
            max_ranks=ranks,
            lanes=1,
            lane_parts=1 if on_cpu else _GPU_BLOCKS,
            lane_bytes=_PIECE_BYTES if on_cpu else _GPU_PIECE_BYTES,
        )
        self.ranks, self.device, self._timeout_s = ranks, device, timeout_ms / 1e3
        with contextlib.ExitStack() as undo:
            self._endpoint = Endpoint(rank, shape, rendezvous=directory, device=device.type, timeout_ms=timeout_ms)
            undo.callback(self._endpoint.close)
            connect = self._endpoint.connect_ranks
            presence.patiently(members, patience_s, lambda seconds: connect(members, timeout=seconds))
            kind = Lane if on_cpu else DeviceLane
            self._lane = kind(self._endpoint, Gate(), group_id("rows"), list(range(ranks)))
            undo.callback(self._lane.close)
            with presence.watching(members, self._endpoint):
                self._endpoint.timeout_ms = patience_s * 1e3  # on a GPU a call has this deadline, not its own
                self._lane.call("meeting", calls.barrier().args, patience_s)
                self.check()
                self._endpoint.timeout_ms = timeout_ms
            self._undo = undo.pop_all()

    @property
    def missing(self) -> tuple[int, ...]:
        """The members that did not answer, or sent what cannot be."""
        status = self._endpoint.status()
        return tuple(sorted({*status.suspects, *status.corrupt}))

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, zeros for those that take no part."""
        rows = row.new_zeros(self.ranks, *row.shape)
        self._run(calls.all_gather_single(rows, row.contiguous(), self.ranks))
        return rows

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """``send`` and ``receive``: how many rows go to, and come from, each rank. In rank order on both sides."""
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        self._run(calls.all_to_all_single(received, rows.contiguous(), receive, send, self.ranks))
        return received

    def meet(self) -> None:
        """Waits for every member."""
        self._run(calls.barrier())
        self.check()

    def check(self) -> None:
        """Raises :class:`eep.StepFailed` if what was received cannot be trusted. On a GPU this waits for it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._endpoint.status().raise_if_bad()

    def close(self) -> None:
        self._undo.close()

    def _run(self, call: Call) -> None:
        self._lane.call(call.name, call.args, self._timeout_s)
