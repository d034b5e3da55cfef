"""FlashInfer's exchange as a contender: workspaces that the ranks map, two kernels before rows are there, and two more until
they are added up.

As in its own use, rows that travel as fp8 are encoded before. The kernels of each rank run on an equal part of the
multiprocessors: with all of them for all, blocks that wait may take the room of those that they wait for.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from pathlib import Path

import torch

from bench.exchange.contest_data import hosts_of, input_of, wanted_sums
from bench.exchange.cuda_rank import ROUNDS, Case, routing
from bench.exchange.flashinfer.library import Exchange, Places, load

_PATIENCE_S = 30.0
_HANDLE_BYTES = 64
_GROUP = 128
"""Values to a scale."""


class FlashInferContender:
    """A rank of it, with one graph."""

    def __init__(self, case: Case, rank: int, place: str) -> None:
        self.case, self.rank = case, rank
        self._library, self._place = load(Path(case.flashinfer)), place
        self.stream = _stream(Path(case.flashinfer), case.ranks, rank)
        self._x = input_of(case, rank).cuda()
        self._scale: torch.Tensor | None = None
        if case.wire != "bf16":
            groups = self._x.float().unflatten(1, (-1, _GROUP))
            scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
            self._x = (groups / scale).flatten(1).to(torch.float8_e4m3fn)
            self._scale = scale.squeeze(-1).contiguous()
        self._experts = routing(case, rank).int().cuda()
        self._weights = torch.ones(case.tokens, case.topk, device="cuda")
        self._out = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device="cuda")
        self._exchange = Exchange(
            ranks=case.ranks,
            rank=rank,
            experts=case.experts,
            topk=case.topk,
            tokens=case.tokens,
            hidden=case.hidden,
            row_bytes=self._x[0].nbytes,
            scales=0 if self._scale is None else case.hidden // _GROUP,
            overlaps=case.overlaps,
            threads=case.threads,
            x=self._x.data_ptr(),
            scale=None if self._scale is None else self._scale.data_ptr(),
            experts_of_tokens=self._experts.data_ptr(),
            weights=self._weights.data_ptr(),
            out=self._out.data_ptr(),
        )
        self._at = Places()
        self._library.places_of(self._exchange, self._at)
        self._own, handle = ctypes.c_void_p(), ctypes.create_string_buffer(_HANDLE_BYTES)
        _check(self._library.make_workspace(self._at.end, self._own, handle), "making a workspace")
        self._opened: list[ctypes.c_void_p] = []
        written = Path(f"{place}-{rank}.new")
        written.write_bytes(handle.raw)
        written.rename(f"{place}-{rank}")
        self._around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def connect(self) -> None:
        for rank in range(self.case.ranks):
            self._exchange.workspace[rank] = (self._own if rank == self.rank else self._open(rank)).value

    def prepare(self) -> None:
        """By all ranks at once. AssertionError if it delivers anything else than what was sent."""
        self._deliver()
        self.plain = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.plain, stream=self.stream):
            for _ in range(ROUNDS):
                self._dispatch()
                self._combine()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self.stream):
            self._around[0].record()
            graph.replay()
            self._around[1].record()

    def round_us(self) -> float:
        return self._around[0].elapsed_time(self._around[1]) * 1e3 / ROUNDS

    def finish(self) -> None:
        """It puts rows elsewhere each time, so that the sums of the last replay say nothing."""
        self._deliver()

    def let_go(self) -> None:
        """Of the memory of the others, before any of them frees it."""
        torch.cuda.synchronize()
        for memory in self._opened:
            self._library.close_workspace(memory)
        self._opened.clear()

    def close(self) -> None:
        self.plain.reset()
        self._library.free_workspace(self._own)

    def _deliver(self) -> None:
        with torch.cuda.stream(self.stream):
            self._dispatch()
            torch.cuda.synchronize()
            self._compare_rows()
            outputs = torch.full(
                (self.case.ranks * self.case.tokens, self.case.hidden),
                self.rank + 1,
                dtype=torch.bfloat16,
                device="cuda",
            )
            self._copy(self._own_at(self._at.outputs), outputs.data_ptr(), outputs.nbytes)
            self._combine()
        torch.cuda.synchronize()
        if not torch.equal(self._out.float().cpu(), wanted_sums(self.case, self.rank)):
            raise AssertionError(
                f"rank {self.rank} got other sums from FlashInfer than those of what the experts wrote"
            )

    def _compare_rows(self) -> None:
        """The rows of a source come in any order."""
        case = self.case
        rows = torch.empty(case.ranks, case.tokens, case.hidden, dtype=self._x.dtype, device="cuda")
        counts = torch.empty(case.ranks, dtype=torch.int32, device="cuda")
        self._copy(rows.data_ptr(), self._own_at(self._at.rows), rows.nbytes)
        self._copy(counts.data_ptr(), self._own_at(self._at.received), counts.nbytes)
        scales = torch.ones(case.ranks, case.tokens, max(1, self._exchange.scales), device="cuda")
        if self._exchange.scales:
            self._copy(scales.data_ptr(), self._own_at(self._at.scales), scales.nbytes)
        received = (rows.float().unflatten(2, (scales.shape[2], -1)) * scales[..., None]).flatten(2).round()
        for source, count in enumerate(counts.tolist()):
            sent = input_of(case, source)[hosts_of(case, source)[:, self.rank]].cuda().float()
            if count != len(sent) or not torch.equal(_sorted(received[source, :count]), _sorted(sent)):
                raise AssertionError(
                    f"rank {self.rank} received something else than rank {source} sent with FlashInfer"
                )

    def _dispatch(self) -> None:
        _check(self._library.dispatch(self._exchange, torch.cuda.current_stream().cuda_stream), "dispatch")

    def _combine(self) -> None:
        _check(self._library.combine(self._exchange, torch.cuda.current_stream().cuda_stream), "combine")

    def _own_at(self, offset: int) -> int:
        return (self._own.value or 0) + offset

    def _copy(self, to: int, source: int, size: int) -> None:
        _check(self._library.copy_bytes(to, source, size), "copying")

    def _open(self, rank: int) -> ctypes.c_void_p:
        path, end = Path(f"{self._place}-{rank}"), time.monotonic() + _PATIENCE_S
        while not path.exists():
            if time.monotonic() > end:
                raise AssertionError(f"rank {rank} made no workspace within {_PATIENCE_S:g} s")
            time.sleep(0.001)
        memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(path.read_bytes(), _HANDLE_BYTES)
        _check(self._library.open_workspace(handle, memory), f"opening the workspace of rank {rank}")
        self._opened.append(memory)
        return memory


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """In an order that depends on the rows alone. Rows that are told apart by less than that are the same to the sum."""
    weights = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(rows.device)
    return rows[(rows.double() @ weights).argsort()]


@cache
def _stream(library: Path, parts: int, number: int) -> torch.cuda.ExternalStream:
    stream = ctypes.c_void_p()
    _check(load(library).make_stream_on_part(parts, number, stream), "taking a part of the multiprocessors")
    return torch.cuda.ExternalStream(stream.value)


def _check(code: int, what: str) -> None:
    if code:
        raise AssertionError(f"FlashInfer: {what}: CUDA error {code}")
