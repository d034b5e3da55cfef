"""The rank processes of one benchmark: the parent sends all of them the same request, and all must answer.

The processes are forked from a server that has imported torch once, so that sixteen of them start as fast as one.
If a rank fails or does not answer in time, the parent ends all of them, and the error says why.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

PATIENCE_S = 60.0
"""Longer than any exchange takes, even on a busy machine: a rank that waits this long waits for a peer that is gone."""


class FleetError(RuntimeError):
    """A rank failed; the benchmark cannot go on."""


class FleetRank(Protocol):
    """One rank of a fleet. Each request of the parent names one of its methods."""

    def close(self) -> None:
        """The parent is done with this rank, or gone."""


def serve_requests(make_rank: Callable[[], FleetRank], pipe: Connection) -> None:
    """The life of a rank process: makes the rank, then answers requests until the parent closes the pipe.

    A request is the name of a method and its arguments; an answer is ``("ok", value)`` or ``("error", text)``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the end of its pipe ends this process
    try:
        rank = make_rank()
        pipe.send(("ok", None))
        while True:
            try:
                request, *arguments = pipe.recv()
            except EOFError:
                break
            pipe.send(("ok", getattr(rank, request)(*arguments)))
        rank.close()
    except Exception:
        with contextlib.suppress(OSError):  # another rank may have failed first, and the parent be gone
            pipe.send(("error", traceback.format_exc()))


class Fleet:
    """Connected ranks that wait for requests."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self._processes = processes
        self._pipes = pipes
        self._gather()  # every rank says once that it is ready

    def ask(self, *request: Any) -> list[Any]:
        """Sends one request to every rank; returns their answers in rank order."""
        for pipe in self._pipes:
            pipe.send(request)
        return self._gather()

    def _gather(self) -> list[Any]:
        deadline = time.monotonic() + 2 * PATIENCE_S
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise FleetError(f"rank {rank} did not answer within {2 * PATIENCE_S:.0f} s")
            try:
                outcome, value = pipe.recv()
            except EOFError:
                self._processes[rank].join(PATIENCE_S)
                raise FleetError(f"rank {rank} ended with code {self._processes[rank].exitcode}") from None
            if outcome == "error":
                raise FleetError(f"rank {rank} failed:\n{value}")
            answers.append(value)
        return answers


@contextlib.contextmanager
def start_ranks(life: Callable[[Any, Connection], None], seats: Sequence[Any]) -> Iterator[Fleet]:
    """One process that leads ``life`` for each of the ``seats``, in the order of ranks. None outlives the with block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "eep.data_plane.buffer"])
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank, seat in enumerate(seats):
            ours, theirs = context.Pipe()
            process = context.Process(target=life, args=(seat, theirs), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()  # so that the end of the rank is the end of the pipe
            processes.append(process)
            pipes.append(ours)
        yield Fleet(processes, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        deadline = time.monotonic() + 10
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
