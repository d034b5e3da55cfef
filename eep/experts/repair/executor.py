"""Carry out a repair plan on one rank: read, verify, fall back, in place.

Each transfer is read straight into its slot, or aside first where the plan says so, and then verified by
checksum. When a source is gone, fails or sends wrong bytes, the next source of the transfer takes over.
Sources work in parallel, each one batch at a time, and must be alive before each batch.

Until ``execute_repair`` returns, the slots it writes hold nothing that may be served: publish routing tables
afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from eep import faults
from eep.errors import EepError
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory, checksum
from eep.experts.repair.peer_memory import copy_all
from eep.experts.repair.reader import Reader, SourceLost, Want
from eep.experts.repair.repair_plan import Origin, RepairPlan, Tier, Transfer
from eep.long_work import wait_in_parts

# Large enough that a batch is worth a request, small enough that little is lost with a source.
BATCH_BYTES = 64 << 20
_MOST_WORKERS = 8
_LOOKS_EVERY_S = 0.05
"""How soon a repair that is told to stop does so."""


class RepairFailed(EepError):
    """No source delivered some experts. The slots that were to hold them must not be served.

    ``still_reading``: the reads that the repair stopped waiting for. Each may write into its slots until it ends, and no
    other repair may begin before that.
    """

    def __init__(self, message: str, transfers: Sequence[Transfer], still_reading: Sequence[Future[Any]] = ()) -> None:
        super().__init__(message)
        self.transfers = tuple(transfers)
        self.still_reading = tuple(still_reading)


@dataclass
class RepairReport:
    """What a repair did: bytes that arrived verified, by tier, and every attempt that failed, in words."""

    bytes_by_tier: Counter[Tier] = field(default_factory=Counter)
    setbacks: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    transfer: Transfer
    into: list[torch.Tensor]
    attempt: int = 0

    @property
    def origin(self) -> Origin:
        return self.transfer.origins[self.attempt]


@dataclass(frozen=True, slots=True)
class _Repair:
    """What all steps of one repair share."""

    memory: ExpertMemory
    reader_of: Callable[[Origin], Reader]
    checksums: Checksums
    deadline: float
    report: RepairReport
    passed: Callable[[], None]
    """Called with every batch that was read: a fault point."""
    stop: threading.Event | None = None
    """Ends the repair before its deadline."""

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline or (self.stop is not None and self.stop.is_set())

    @property
    def patience(self) -> float:
        left = max(0.0, self.deadline - time.monotonic())
        return left if self.stop is None else min(left, _LOOKS_EVERY_S)


def execute_repair(
    plan: RepairPlan,
    rank: int,
    memory: ExpertMemory,
    reader_of: Callable[[Origin], Reader],
    checksums: Checksums,
    *,
    timeout: float = 120.0,
) -> RepairReport:
    """Carries out the part of ``rank`` in ``plan``, which is that of all ranks. Then every expert is there, verified.

    ``reader_of`` opens a source and may raise :class:`SourceLost`. No rank waits for another: what one of them
    overwrites before another has read it does not verify there, and comes from the next source. Staged experts are
    verified before the first slot is written.
    """
    mine = plan.of(rank)
    _check(mine, checksums)
    run = _Repair(memory, reader_of, checksums, time.monotonic() + timeout, RepairReport(), _pass_point)
    aside = []
    for transfer in mine.transfers:
        if transfer.staged:
            pieces = memory.pieces(transfer.layer, transfer.slot)
            aside.append(_Job(transfer, [torch.empty_like(piece) for piece in pieces]))
    _bring_in(aside, run)
    direct = [_Job(t, memory.pieces(t.layer, t.slot)) for t in mine.transfers if not t.staged]
    for job in aside:
        copy_all(memory.pieces(job.transfer.layer, job.transfer.slot), job.into)
    _bring_in(direct, run)
    return run.report


def read_aside(
    plan: RepairPlan,
    places: Sequence[list[torch.Tensor]],
    memory: ExpertMemory,
    reader_of: Callable[[Origin], Reader],
    checksums: Checksums,
    *,
    timeout: float,
    passed: Callable[[], None],
    stop: threading.Event | None = None,
) -> RepairReport:
    """Reads every expert of ``plan`` into its place, and verifies it. A place is beside the slots, or is a slot to which no
    token goes: steps go on meanwhile. ``passed()`` is called with every batch that was read, and ``stop`` ends it early, with
    :class:`RepairFailed`."""
    _check(plan, checksums)
    run = _Repair(memory, reader_of, checksums, time.monotonic() + timeout, RepairReport(), passed, stop)
    _bring_in([_Job(transfer, into) for transfer, into in zip(plan.transfers, places, strict=True)], run)
    return run.report


def _pass_point() -> None:
    faults.at("repair.mid")


def _check(mine: RepairPlan, checksums: Checksums) -> None:
    if mine.unreachable:
        raise RepairFailed(_nowhere(mine.unreachable), mine.unreachable)
    unknown = [t for t in mine.transfers if not checksums.known[t.layer, t.expert]]
    if unknown:
        raise ValueError(
            f"no checksum is known for expert {unknown[0].expert} of layer {unknown[0].layer} "
            f"({len(unknown)} such experts): take them when the model is loaded"
        )


def _bring_in(jobs: list[_Job], run: _Repair) -> None:
    """Works through ``jobs``, all sources at once, until each is done or has run out of sources.

    A source reads its next batch while the last one is verified.
    """
    if not jobs:
        return
    queues = _Queues(jobs, run)
    reading: dict[Future[str | None], list[_Job]] = {}
    verifying: dict[Future[list[str | None]], list[_Job]] = {}
    late: list[list[_Job]] = []
    pool = ThreadPoolExecutor(
        _MOST_WORKERS, thread_name_prefix="eep-repair", initializer=_use, initargs=(run.memory.region.device,)
    )
    try:
        while reading or verifying or queues.have_jobs:
            for batch in queues.next_batches(busy={_source(batch[0].origin) for batch in reading.values()}):
                reading[pool.submit(_read, batch, run.reader_of)] = batch
            under_way: list[Future[Any]] = [*reading, *verifying]
            done, _ = wait_in_parts(under_way, run.patience, FIRST_COMPLETED)
            if not done:
                if run.stop is not None and not run.is_over:
                    continue
                late = [*reading.values(), *verifying.values()]
                break
            for read in [future for future in reading if future in done]:
                batch, trouble = reading.pop(read), read.result()
                run.passed()
                if trouble is None:
                    verifying[pool.submit(_verify, batch, run.checksums)] = batch
                else:
                    queues.take_back(batch, [trouble] * len(batch))
            for verified in [future for future in verifying if future in done]:
                queues.take_back(verifying.pop(verified), verified.result())
    finally:
        # A source that is stuck keeps its thread, not this one; the error says that its slots must not be served.
        pool.shutdown(wait=False, cancel_futures=True)
    if late:
        # Only now is it certain which reads go on: those that had not begun never will.
        raise _late(late, [read for read in reading if not read.done()])
    if queues.failed:
        raise RepairFailed(f"{_nowhere(queues.failed)} Last: {run.report.setbacks[-1]}", queues.failed)


class _Queues:
    """The jobs that wait for each source, and those that no source is left for."""

    def __init__(self, jobs: Sequence[_Job], run: _Repair) -> None:
        self.failed: list[Transfer] = []
        self._report, self._expert_bytes = run.report, run.memory.layout.expert_bytes
        self._waiting: defaultdict[tuple[Tier, int, str], deque[_Job]] = defaultdict(deque)
        for job in jobs:
            self._waiting[_source(job.origin)].append(job)

    @property
    def have_jobs(self) -> bool:
        return any(self._waiting.values())

    def next_batches(self, busy: Set[tuple[Tier, int, str]]) -> Iterator[list[_Job]]:
        """One batch for each source that is not ``busy``."""
        most = max(1, BATCH_BYTES // self._expert_bytes)
        for source, queue in self._waiting.items():
            if queue and source not in busy:
                yield [queue.popleft() for _ in range(min(len(queue), most))]

    def take_back(self, batch: Sequence[_Job], troubles: Sequence[str | None]) -> None:
        """Counts what arrived, and sends what did not to its next source."""
        for job, trouble in zip(batch, troubles, strict=True):
            if trouble is None:
                self._report.bytes_by_tier[job.origin.tier] += self._expert_bytes
                continue
            expert = f"layer {job.transfer.layer} expert {job.transfer.expert}"
            self._report.setbacks.append(f"{expert} from {job.origin}: {trouble}")
            job.attempt += 1
            if job.attempt < len(job.transfer.origins):
                self._waiting[_source(job.origin)].append(job)
            else:
                self.failed.append(job.transfer)


def _use(device: torch.device) -> None:
    """A new thread has the first GPU as its current one, and memory is mapped on the current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _read(batch: list[_Job], reader_of: Callable[[Origin], Reader]) -> str | None:
    """Read a batch from its source; what went wrong, if anything."""
    origin = batch[0].origin
    try:
        reader = reader_of(origin)
        if not reader.alive():
            raise SourceLost("it is gone")
        reader.read([Want(job.transfer.layer, job.transfer.expert, job.origin.slot, job.into) for job in batch])
    except SourceLost as error:
        return str(error)
    return None


def _verify(batch: list[_Job], checksums: Checksums) -> list[str | None]:
    right = [checksums.matches(job.transfer.layer, job.transfer.expert, checksum(job.into)) for job in batch]
    return [None if each else "wrong checksum" for each in right]


def _late(batches: Sequence[list[_Job]], reading: Sequence[Future[Any]]) -> RepairFailed:
    stuck = [job.transfer for batch in batches for job in batch]
    where = ", ".join(sorted({str(batch[0].origin) for batch in batches}))
    return RepairFailed(
        f"{where} did not deliver {len(stuck)} experts before the repair ran out of time", stuck, reading
    )


def _source(origin: Origin) -> tuple[Tier, int, str]:
    return origin.tier, origin.rank, origin.backup


def _nowhere(transfers: Sequence[Transfer]) -> str:
    first = transfers[0]
    return (
        f"no source delivered {len(transfers)} experts, among them expert {first.expert} of layer "
        f"{first.layer}: start a backup service, name a checkpoint, or mask these experts."
    )
