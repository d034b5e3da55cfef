"""The processes of the GPU benchmark: they own ranks, one each or all in one, and measure one case after the other."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import eep
from bench.common.timing import percentile
from bench.exchange.cuda_contest import measure_contest
from bench.exchange.cuda_rank import Case, measure_ranks, patch_table
from eep.abi import native

PATIENCE_S = 120
PARTING_S = 30
"""How long the processes may take to end, all of them together."""
T = TypeVar("T")


def _serve(connection: Connection, owned: list[int]) -> None:
    """The life of a process: calls what it is sent, with the ranks it owns first if the call is about ranks."""
    while (message := connection.recv()) is not None:
        call, is_of_ranks, arguments = message
        try:
            connection.send(call(owned, *arguments) if is_of_ranks else call(*arguments))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


class CudaFleet:
    """Processes that own ranks, one each or one for all."""

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind = kind
        context = mp.get_context("spawn")
        self._processes = []
        for owned in [list(range(ranks))] if kind == "streams" else [[rank] for rank in range(ranks)]:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, owned), daemon=True)
            process.start()
            self._processes.append((process, ours))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self._processes)

    def ask_all(self, call: Callable[..., T], *arguments: Any) -> list[T]:
        """What all processes do together, each with the ranks it owns as the first argument."""
        return self._ask(self.size, call, True, arguments)

    def ask_one(self, call: Callable[..., T], *arguments: Any) -> T:
        """A measurement that one process makes alone."""
        answer: T = self._ask(1, call, False, arguments)[0]
        return answer

    def stations(self, case: Case, replays: int) -> dict[str, tuple[float, float]]:
        """Where a round of rank 0 spends its time, by station: when the first and the last of its blocks passed it, in us
        since the first one began the dispatch; medians."""
        seen = self._measure(replace(case, stamped=True), replays)[0]["stations"]
        names = [f"dispatch: {name}" for name in native.BlockStamps.STATIONS]
        names += [f"combine: {name}" for name in native.BlockStamps.COMBINE_STATIONS]
        told = {}
        for name, passed in zip(names, zip(*seen, strict=True), strict=True):
            first, last = (statistics.median(times) for times in zip(*passed, strict=True))
            told[name] = (first, last)
        return told

    def patch_us(self, case: Case, times: int = 5) -> float:
        """How long the slowest survivor of a loss takes to patch its table: the median of some losses."""
        slowest = []
        for _ in range(times):
            with eep.Rendezvous.temporary() as rendezvous:
                slowest.append(max(self._ask(case.ranks, patch_table, True, (case, str(rendezvous.path)))))
        return statistics.median(slowest)

    def _measure(self, case: Case, replays: int) -> list[Any]:
        with eep.Rendezvous.temporary() as rendezvous:
            count = 1 if self.kind == "streams" else case.ranks
            return self._ask(count, measure_ranks, True, (case, str(rendezvous.path), replays))

    def measure(self, case: Case, replays: int) -> dict[str, Any]:
        answers = self._measure(case, replays)
        rounds = [max(times) for times in zip(*(answer["round"] for answer in answers), strict=True)]
        return summarize(case, self.kind, rounds, answers[0]["split"])

    def contest(self, cases: Sequence[Case], blocks: int, replays: int) -> list[list[float]]:
        """For each contender, how many us the slowest rank took for a round, replay by replay."""
        with tempfile.TemporaryDirectory(prefix="eep-bench-") as place:
            answers = self._ask(cases[0].ranks, measure_contest, True, (list(cases), f"{place}/c", blocks, replays))
        return [
            [max(times) for times in zip(*(answer[number] for answer in answers), strict=True)]
            for number in range(len(cases))
        ]

    def close(self) -> None:
        """All are told before any is waited for: the last steps of some may need the others."""
        for _, connection in self._processes:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.send(None)
        end = time.monotonic() + PARTING_S
        for process, _ in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()

    def _ask(self, count: int, call: Callable[..., Any], is_of_ranks: bool, arguments: tuple[Any, ...]) -> list[Any]:
        chosen = [connection for _, connection in self._processes[:count]]
        for connection in chosen:
            connection.send((call, is_of_ranks, arguments))
        answers = []
        for number, connection in enumerate(chosen):
            if not connection.poll(PATIENCE_S):
                raise RuntimeError(f"process {number} did not answer {call.__name__}{arguments} within {PATIENCE_S} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                raise RuntimeError(f"process {number} ended in {call.__name__}{arguments}") from None
        for number, answer in enumerate(answers):
            if isinstance(answer, str):
                raise RuntimeError(f"process {number} failed in {call.__name__}{arguments}: {answer}")
        return answers


@contextlib.contextmanager
def start_cuda_ranks(kind: str, ranks: int) -> Iterator[CudaFleet]:
    """``kind``: "processes" or "streams"."""
    if kind == "streams":
        # A kernel that waits needs a hardware queue of its own; streams of one process share them unless there are enough.
        # And the driver must not have to load a kernel while another waits.
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    fleet = CudaFleet(kind, ranks)
    try:
        yield fleet
    finally:
        fleet.close()
        for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
            os.environ.pop(variable, None)


def summarize(case: Case, ranks_are: str, rounds: list[float], split: list[tuple[float, float]]) -> dict[str, Any]:
    dispatch, combine = [pair[0] for pair in split], [pair[1] for pair in split]
    return {
        **asdict(case),
        "ranks_are": ranks_are,
        "round_us": statistics.median(rounds),
        "round_p99_us": percentile(rounds, 0.99),
        "dispatch_us": statistics.median(dispatch),
        "dispatch_p99_us": percentile(dispatch, 0.99),
        "combine_us": statistics.median(combine),
        "combine_p99_us": percentile(combine, 0.99),
    }
