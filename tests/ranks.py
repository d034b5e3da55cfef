"""Rank processes that a test can command, stop and kill.

Each is a real process with one :class:`eep.Buffer`. The test sends it the name of one of :class:`RankProgram`'s methods
and reads the answer; a process that is gone answers :data:`DIED`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

import eep
from tests import moe
from tests.forks import CONTEXT
from tests.rank_program import BEGUN, PATIENCE_S, RankProgram

DIED = "died"


def _serve(connection: Connection, kind: type[Any], arguments: tuple[Any, ...]) -> None:
    try:
        program = kind(*arguments)
    except Exception as error:
        connection.send(error)
        return
    program.tell = connection.send
    connection.send(None)
    while True:
        try:
            name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(program, name)(*args, **kwargs)
        except Exception as error:
            answer = error
        connection.send(answer)


class CommandedProcess:
    """A process with one object of class ``kind``, whose methods it calls as told."""

    def __init__(self, name: str, kind: type[Any], arguments: tuple[Any, ...]) -> None:
        self.name = name
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._raise(self._receive())

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            self._connection.send((method, args, kwargs))
        except BrokenPipeError:
            pass  # the process is gone, and the answer will say so

    def answer(self) -> Any:
        return self._raise(self._receive())

    def has_answered(self) -> bool:
        """Whether :meth:`answer` would not wait."""
        return self._connection.poll()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.send(method, *args, **kwargs)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait_until_stopped(self) -> None:
        """Waits until the process has stopped itself at a fault point."""
        end = time.monotonic() + PATIENCE_S
        while (state := _state(self.pid)) != "T":
            assert time.monotonic() < end, f"{self.name} is in state {state}, not stopped"
            time.sleep(0.002)

    def wait_until_dead(self) -> None:
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def _receive(self) -> Any:
        try:
            if not self._connection.poll(PATIENCE_S):
                raise TimeoutError(f"{self.name} did not answer within {PATIENCE_S:.0f} s")
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            return DIED

    def _raise(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


class RankProcess(CommandedProcess):
    def __init__(
        self,
        rank: int,
        path: str,
        config: moe.Config,
        timeout_ms: float = 60_000,
        incarnation: int | None = None,
        program: type[RankProgram] = RankProgram,
    ) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}", program, (rank, path, config, timeout_ms, incarnation))


class Ranks:
    """A group of rank processes with one rendezvous; killed, whatever happens, at the end."""

    def __init__(
        self,
        rendezvous: eep.Rendezvous,
        config: moe.Config,
        timeout_ms: float = 60_000,
        program: type[RankProgram] = RankProgram,
    ) -> None:
        self.program = program
        self.path = str(rendezvous.path)
        self.config = config
        self.timeout_ms = timeout_ms
        self.processes: dict[int, RankProcess] = {}
        self.past: list[RankProcess] = []

    def start(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.launch(rank)

    def launch(self, rank: int, incarnation: int | None = None) -> RankProcess:
        if rank in self.processes:
            self.past.append(self.processes[rank])
        process = RankProcess(rank, self.path, self.config, self.timeout_ms, incarnation, self.program)
        self.processes[rank] = process
        return process

    def connect(self, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        self.all(ranks, "connect", ranks)
        self.all(ranks, "barrier")

    def all(self, ranks: Iterable[int], method: str, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """The same call on several ranks at once."""
        ranks = list(ranks)
        for rank in ranks:
            self.processes[rank].send(method, *args, **kwargs)
        return {rank: self.processes[rank].answer() for rank in ranks}

    def begin(self, ranks: Iterable[int], method: str, *args: Any) -> None:
        """The same call of many steps on several ranks. Returns when each has the first step behind it and goes on."""
        ranks = list(ranks)
        self.all(ranks, "tell_when_begun")
        for rank in ranks:
            self.processes[rank].send(method, *args)
        for rank in ranks:
            told = self.processes[rank].answer()
            assert told == BEGUN, f"rank {rank} ended its steps before the first was over: {told}"

    def check_steps(self, ranks: Iterable[int], seed: int, count: int = 1) -> None:
        """Steps on ``ranks``, every result compared with the reference, every status good."""
        active = tuple(ranks)
        for rank, (outputs, status) in self.all(active, "step", seed, active, count).items():
            assert status.ok, f"rank {rank}: {status}"
            assert len(outputs) == count
            self.check_outputs(rank, outputs, seed, active)

    def check_outputs(self, rank: int, outputs: list[torch.Tensor], seed: int, active: tuple[int, ...]) -> None:
        """The results that a rank trusted must equal the reference, bit for bit."""
        for i, output in enumerate(outputs):
            batch = moe.make_batch(self.config, rank, seed + i, active)
            assert torch.equal(output, moe.reference(self.config, batch)), f"rank {rank}, step {i}"

    def replace(self, rank: int, survivors: Iterable[int], incarnation: int | None = None) -> None:
        """A new process takes the place of ``rank``: the survivors admit it between two steps, it takes their view."""
        joiner = self.launch(rank, incarnation)
        joiner.call("warm_up")
        joiner.send("join")
        self.all(survivors, "connect", [rank])
        joiner.answer()

    def __getitem__(self, rank: int) -> RankProcess:
        return self.processes[rank]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.processes.values(), *self.past]:
            process.kill()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
