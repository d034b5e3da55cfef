"""Rank processes that call collectives on CUDA tensors, eagerly or as replays of one captured graph.

Everything is checked where it happens: a rank knows the input of every rank by its seed, works out what it should have got
with plain torch on the CPU, and compares bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import eep
from eep.abi import native
from eep.abi.collectives import CollectiveArgs, Element, Kind, LaneMailbox, Reduction
from eep.data_plane.endpoint import Endpoint
from tests.rank_program import RankProgram

ELEMENTS = {
    torch.uint8: Element.U8,
    torch.int8: Element.I8,
    torch.int16: Element.I16,
    torch.int32: Element.I32,
    torch.int64: Element.I64,
    torch.float16: Element.F16,
    torch.bfloat16: Element.BF16,
    torch.float32: Element.F32,
    torch.float64: Element.F64,
    torch.bool: Element.BOOL,
}
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
WORLD = 77


@dataclass(frozen=True)
class LaneConfig:
    max_ranks: int = 4
    lanes: int = 4
    parts: int = 8
    lane_bytes: int = 64 << 10  # small, so that ordinary sizes take several rounds


class Lanes(Endpoint):
    """An endpoint whose region only serves process groups."""

    def __init__(self, rank: int, place: str, config: LaneConfig, timeout_ms: float, incarnation: int | None) -> None:
        shape = native.Shape(
            max_ranks=config.max_ranks, lanes=config.lanes, lane_parts=config.parts, lane_bytes=config.lane_bytes
        )
        super().__init__(rank, shape, rendezvous=place, device="cuda", incarnation=incarnation, timeout_ms=timeout_ms)

    def open(self, identity: int, ranks: Sequence[int]) -> int:
        return self.context.open_lane(identity, ranks)

    def shut(self, lane: int) -> None:
        self.context.close_lane(lane)

    def collective(self, lane: int, kind: Kind, **fields: object) -> None:
        """Launches one in the current stream. Lists become arrays that live as long as the call."""
        args = CollectiveArgs(lane=lane, kind=kind, deadline_ns=self.table.deadline_ns)
        for name, value in fields.items():
            if name in ("in_blocks", "out_blocks"):
                assert isinstance(value, list)
                setattr(args, name, (ctypes.c_void_p * len(value))(*[tensor.data_ptr() for tensor in value]))
                sizes = (ctypes.c_uint64 * len(value))(*[tensor.numel() * tensor.element_size() for tensor in value])
                setattr(args, name.replace("blocks", "bytes"), sizes)
            else:
                setattr(args, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        self.context.collective(args, self.stream())


def numbers(rank: int, seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of ``rank``; small whole numbers for integers."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=random, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (count,), generator=random).to(dtype)


def reduced(parts: list[torch.Tensor], op: Reduction) -> torch.Tensor:
    """What a reduction of ``parts``, in that order, must give, bit for bit."""
    dtype = parts[0].dtype
    total = parts[0].to(WIDE.get(dtype, dtype))
    for part in parts[1:]:
        part = part.to(total.dtype)
        if op in (Reduction.SUM, Reduction.AVG):
            total = total | part if dtype == torch.bool else total + part
        elif op is Reduction.PROD:
            total = total & part if dtype == torch.bool else total * part
        elif op in (Reduction.MIN, Reduction.MAX):
            total = torch.minimum(total, part) if op is Reduction.MIN else torch.maximum(total, part)
        else:
            total = {Reduction.BAND: total & part, Reduction.BOR: total | part, Reduction.BXOR: total ^ part}[op]
    if op is Reduction.AVG:
        # By a tensor: a division by a number may be turned into a multiplication.
        count = torch.full_like(total, len(parts))
        total = total / count if dtype.is_floating_point else torch.div(total, count, rounding_mode="trunc")
    return total.to(dtype)


class LaneProgram(RankProgram):
    """A rank of one group of all ranks, in which ``active`` are those in the view."""

    buffer: Lanes  # type: ignore[assignment]

    def __init__(self, rank: int, path: str, config: LaneConfig, timeout_ms: float, incarnation: int | None) -> None:
        torch.set_num_threads(1)
        self.ranks = config
        self.buffer = Lanes(rank, path, config, timeout_ms, incarnation)
        self.order = [*reversed(range(config.max_ranks))]  # not the order of the ranks, so that a mix-up shows
        self.lane = self.buffer.open(WORLD, self.order)

    def barrier(self) -> None:
        self.buffer.collective(self.lane, Kind.BARRIER)
        torch.cuda.synchronize()
        self.buffer.status().raise_if_bad()

    def signal_of(self, rank: int) -> int:
        """The flag of the last round that it has entered in the group of all ranks."""
        at = self.buffer.layout_of_region
        mailboxes = at.lanes + self.lane * at.lane_bytes + at.lane_mailboxes
        return int(LaneMailbox.from_buffer_copy(self.mailbox_of(rank, ctypes.sizeof(LaneMailbox), mailboxes)).flag)

    def warm_up(self) -> None:
        self.buffer.connect_ranks([])
        self.run(0, (self.buffer.rank,), 64, "float32")

    # ---- every collective once, compared ----

    def run(self, seed: int, active: tuple[int, ...], count: int, dtype_name: str, offset: int = 0) -> eep.Status:
        """``count`` elements, ``offset`` elements into their storage. Stops at the first result not to be trusted."""
        dtype = getattr(torch, dtype_name)
        for check in (self.check_reductions, self.check_gathers, self.check_rooted, self.check_exchange):
            check(seed, active, count, dtype, offset)
            if not (status := self.buffer.status()).ok:
                return status
        self.barrier()
        return self.buffer.status()

    def check_reductions(self, seed: int, active: tuple[int, ...], count: int, dtype: torch.dtype, offset: int) -> None:
        members = [rank for rank in self.order if rank in active]
        ops = [Reduction.SUM, Reduction.MIN, Reduction.MAX, Reduction.PROD]
        ops += [] if dtype == torch.bool else [Reduction.AVG]
        ops += [] if dtype.is_floating_point else [Reduction.BAND, Reduction.BOR, Reduction.BXOR]
        for op in ops:
            mine = self._on_gpu(numbers(self.buffer.rank, seed, count, dtype), offset)
            expected = reduced([numbers(rank, seed, count, dtype) for rank in members], op)
            self._collective(Kind.ALL_REDUCE, mine, op, in_=mine, out=mine)
            self._compare(f"all_reduce {op.name} {dtype} {count}", mine, expected)

            blocks = [self._on_gpu(numbers(self.buffer.rank, seed + 1 + to, count, dtype), offset) for to in self.order]
            out = self._on_gpu(torch.zeros(count, dtype=dtype), offset)
            self._collective(Kind.REDUCE_SCATTER, out, op, in_blocks=blocks, out=out)
            parts = [numbers(rank, seed + 1 + self.buffer.rank, count, dtype) for rank in members]
            self._compare(f"reduce_scatter {op.name} {dtype} {count}", out, reduced(parts, op))

    def check_gathers(self, seed: int, active: tuple[int, ...], count: int, dtype: torch.dtype, offset: int) -> None:
        mine = self._on_gpu(numbers(self.buffer.rank, seed, count, dtype), offset)
        out = [self._on_gpu(torch.ones(count, dtype=dtype), offset) for _ in self.order]
        self._collective(Kind.ALL_GATHER, mine, in_=mine, out_blocks=out)
        for rank, block in zip(self.order, out, strict=True):
            # A block that no rank sends keeps what it held.
            expected = numbers(rank, seed, count, dtype) if rank in active else torch.ones(count, dtype=dtype)
            self._compare(f"all_gather {dtype} {count}, block of rank {rank}", block, expected)

    def check_rooted(self, seed: int, active: tuple[int, ...], count: int, dtype: torch.dtype, offset: int) -> None:
        root = active[seed % len(active)]
        is_root = self.buffer.rank == root
        mine = self._on_gpu(numbers(self.buffer.rank, seed, count, dtype), offset)
        self._collective(Kind.BROADCAST, mine, root=root, in_=mine, out=mine)
        self._compare(f"broadcast {dtype} {count}", mine, numbers(root, seed, count, dtype))

        blocks = [self._on_gpu(numbers(to, seed + 1, count, dtype), offset) for to in self.order] if is_root else []
        self._collective(Kind.SCATTER, mine, root=root, in_blocks=blocks, out=mine)
        self._compare(f"scatter {dtype} {count}", mine, numbers(self.buffer.rank, seed + 1, count, dtype))

        out = [self._on_gpu(torch.zeros(count, dtype=dtype), offset) for _ in self.order] if is_root else []
        self._collective(Kind.GATHER, mine, root=root, in_=mine, out_blocks=out)
        for rank, block in zip(self.order, out, strict=False):
            if rank in active:
                self._compare(f"gather {dtype} {count} from {rank}", block, numbers(rank, seed + 1, count, dtype))

        self._collective(Kind.REDUCE, mine, Reduction.SUM, root=root, in_=mine, out=mine)
        if is_root:
            parts = [numbers(rank, seed + 1, count, dtype) for rank in self.order if rank in active]
            self._compare(f"reduce {dtype} {count}", mine, reduced(parts, Reduction.SUM))

    def check_exchange(self, seed: int, active: tuple[int, ...], count: int, dtype: torch.dtype, offset: int) -> None:
        def size(source: int, target: int) -> int:
            return count * ((3 * source + 5 * target + seed) % 4) // 3 if seed % 2 else count

        me = self.buffer.rank
        blocks = [self._on_gpu(numbers(me, seed + to, size(me, to), dtype), offset) for to in self.order]
        out = [self._on_gpu(torch.ones(size(rank, me), dtype=dtype), offset) for rank in self.order]
        self._collective(Kind.ALL_TO_ALL, out[0], in_blocks=blocks, out_blocks=out)
        for rank, block in zip(self.order, out, strict=True):
            ones = torch.ones(size(rank, me), dtype=dtype)
            expected = numbers(rank, seed + me, size(rank, me), dtype) if rank in active else ones
            self._compare(f"all_to_all {dtype} {count} from {rank}", block, expected)

    # ---- the same over and over, until something is wrong ----

    def repeat(self, seed: int, active: tuple[int, ...], count: int, times: int) -> tuple[int, eep.Status]:
        """How many of ``times`` all_reduces could be trusted; each of them is compared."""
        for i in range(times):
            mine = self._on_gpu(numbers(self.buffer.rank, seed + i, count, torch.bfloat16))
            self._collective(Kind.ALL_REDUCE, mine, Reduction.SUM, in_=mine, out=mine)
            status = self.buffer.status()
            if not status.ok:
                return i, status
            parts = [numbers(rank, seed + i, count, torch.bfloat16) for rank in self.order if rank in active]
            assert torch.equal(mine.cpu(), reduced(parts, Reduction.SUM)), f"rank {self.buffer.rank}, call {i}"
            self.one_is_over()
        return times, self.buffer.status()

    def differ(self, kind: str, count: int) -> eep.Status:
        """One call that may not be that of the others."""
        mine = self._on_gpu(torch.ones(count))
        outputs = [torch.zeros_like(mine) for _ in self.order]
        self._collective(Kind[kind], mine, in_=mine, out=mine, out_blocks=outputs)
        return self.buffer.status()

    def suspect(self, rank: int) -> None:
        self.buffer.suspect(rank)

    # ---- groups ----

    def group(self, identity: int, ranks: list[int], count: int) -> eep.Status:
        """Opens a group, sums in it, closes it."""
        lane = self.buffer.open(identity, ranks)
        mine = self._on_gpu(numbers(self.buffer.rank, identity, count, torch.float32))
        self._collective(Kind.ALL_REDUCE, mine, Reduction.SUM, lane=lane, in_=mine, out=mine)
        expected = reduced([numbers(rank, identity, count, torch.float32) for rank in ranks], Reduction.SUM)
        self._compare(f"all_reduce in group {identity}", mine, expected)
        self.buffer.collective(lane, Kind.BARRIER)
        torch.cuda.synchronize()
        self.buffer.shut(lane)
        return self.buffer.status()

    def open_another(self, identity: int, ranks: list[int], count: int) -> None:
        """Sums once in a group and closes it; the next one to be opened takes its lane."""
        lane = self.buffer.open(identity, ranks)
        mine = self._on_gpu(numbers(self.buffer.rank, identity, count, torch.float32))
        self._collective(Kind.ALL_REDUCE, mine, Reduction.SUM, lane=lane, in_=mine, out=mine)
        self.buffer.shut(lane)
        self.other = self.buffer.open(identity + 1, ranks)
        assert self.other == lane

    def sum_in_other(self, seed: int, ranks: list[int], count: int) -> eep.Status:
        mine = self._on_gpu(numbers(self.buffer.rank, seed, count, torch.float32))
        self._collective(Kind.ALL_REDUCE, mine, Reduction.SUM, lane=self.other, in_=mine, out=mine)
        expected = reduced([numbers(rank, seed, count, torch.float32) for rank in ranks], Reduction.SUM)
        self._compare("all_reduce in a lane taken again", mine, expected)
        return self.buffer.status()

    def refused(self) -> list[str]:
        """The sentences for calls that are refused."""
        lanes, said = self.buffer, []
        x = torch.zeros(8, device="cuda")
        fields: list[tuple[Kind, dict[str, object]]] = [
            (Kind.ALL_REDUCE, {"bytes": 32, "element": Element.BYTES, "in_": x, "out": x}),
            (Kind.ALL_REDUCE, {"bytes": 32, "element": Element.F32, "reduction": Reduction.BOR, "in_": x, "out": x}),
            (Kind.ALL_REDUCE, {"bytes": 30, "element": Element.F32, "in_": x, "out": x}),
            (Kind.ALL_REDUCE, {"bytes": 32, "element": Element.F32, "in_": x}),
            (Kind.BROADCAST, {"bytes": 32, "root": 60, "in_": x, "out": x}),
        ]
        for kind, arguments in fields:
            try:
                lanes.collective(self.lane, kind, **arguments)
            except ValueError as error:
                said.append(str(error))
        try:
            lanes.collective(3, Kind.BARRIER)
        except ValueError as error:
            said.append(str(error))
        try:
            lanes.context.send(self.lane, 0, 0, None, 0, 1)
        except ValueError as error:
            said.append(str(error))
        return said

    # ---- a captured graph ----

    def capture(self) -> None:
        """Captures alone, with no other rank in the view."""
        self.buffer.connect_ranks([])
        ranks = len(self.order)
        self.small = torch.zeros(600, dtype=torch.bfloat16, device="cuda")
        self.large = torch.zeros(100_000, device="cuda")  # two rounds per piece when more than two take part
        self.blocks = torch.zeros(ranks, 5000, dtype=torch.int32, device="cuda")
        self.small_sum, self.large_sum = torch.zeros_like(self.small), torch.zeros_like(self.large)
        self.gathered, self.exchanged = (
            torch.zeros(ranks, 600, dtype=torch.bfloat16, device="cuda"),
            self.blocks.clone(),
        )
        self.scattered = torch.zeros(5000, dtype=torch.int32, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._layers()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self._layers()

    def _layers(self) -> None:
        blocks, out = list(self.blocks.unbind()), list(self.exchanged.unbind())
        launch = self._launch
        launch(Kind.ALL_REDUCE, self.small, Reduction.SUM, in_=self.small, out=self.small_sum)
        launch(Kind.ALL_GATHER, self.small, in_=self.small, out_blocks=list(self.gathered.unbind()))
        launch(Kind.ALL_REDUCE, self.large, Reduction.SUM, in_=self.large, out=self.large_sum)
        launch(Kind.REDUCE_SCATTER, self.scattered, Reduction.MAX, in_blocks=blocks, out=self.scattered)
        launch(Kind.ALL_TO_ALL, blocks[0], in_blocks=blocks, out_blocks=out)
        self.buffer.collective(self.lane, Kind.BARRIER)

    def replay(self, seed: int, active: tuple[int, ...], count: int) -> tuple[int, eep.Status]:
        """Up to ``count`` replays, ended by the first that is not to be trusted; each trusted result is compared."""
        me, members = self.buffer.rank, [rank for rank in self.order if rank in active]

        def block(source: int, target: int) -> torch.Tensor:
            return numbers(source * 64 + target, seed, 5000, torch.int32)

        for i in range(count):
            seed += 1
            small = {rank: numbers(rank, seed, 600, torch.bfloat16) for rank in members}
            large = {rank: numbers(rank, seed, 100_000, torch.float32) for rank in members}
            self.small.copy_(small[me])
            self.large.copy_(large[me])
            self.blocks.copy_(torch.stack([block(me, to) for to in self.order]))
            self.graph.replay()
            torch.cuda.synchronize()
            status = self.buffer.status()
            if not status.ok:
                return i, status
            self._compare(f"small sum, replay {i}", self.small_sum, reduced([*small.values()], Reduction.SUM))
            self._compare(f"large sum, replay {i}", self.large_sum, reduced([*large.values()], Reduction.SUM))
            most = reduced([block(rank, me) for rank in members], Reduction.MAX)
            self._compare(f"scattered, replay {i}", self.scattered, most)
            for position, rank in enumerate(self.order):
                if rank in active:
                    self._compare(f"gathered, replay {i}", self.gathered[position], small[rank])
                    self._compare(f"exchanged, replay {i}", self.exchanged[position], block(rank, me))
            self.one_is_over()
        return count, self.buffer.status()

    # ---- inside ----

    def _on_gpu(self, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
        storage = torch.zeros(values.numel() + offset, dtype=values.dtype, device="cuda")
        storage[offset:] = values
        return storage[offset:]

    def _launch(
        self, kind: Kind, like: torch.Tensor, op: Reduction = Reduction.SUM, lane: int | None = None, **fields: object
    ) -> None:
        fields |= {"bytes": like.numel() * like.element_size(), "element": ELEMENTS[like.dtype], "reduction": op}
        self.buffer.collective(self.lane if lane is None else lane, kind, **fields)

    def _collective(
        self, kind: Kind, like: torch.Tensor, op: Reduction = Reduction.SUM, lane: int | None = None, **fields: object
    ) -> None:
        self._launch(kind, like, op, lane, **fields)
        torch.cuda.synchronize()

    def _compare(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if self.buffer.status().ok:
            got = got.cpu()
            wrong = int((got != expected).sum())
            assert not wrong, f"rank {self.buffer.rank}: {what}: {wrong} of {got.numel()} are wrong"
